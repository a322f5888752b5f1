"""What a pod's process is started with: what every pod is given (:mod:`elastic_operator.pods`), and what is added here.

The agent is the one of the Python that runs ``elasticjob``, and it runs in the manifest's folder, from which relative
paths are looked up. It inherits the environment of ``elasticjob``, as a program started by hand would, without what is
meant for another agent or another run.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elastic_operator.errors import BadInput
from elastic_operator.local.pod_process import PodCommand
from elastic_operator.model import NewPod
from elastic_operator.pods import Surroundings, agent_command, resolved, user_env
from torchelastic.contract import ExitCode, SizeRecord

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from elastic_operator.local.run_folder import RunFolder
    from elastic_operator.model import Job

_LAUNCHER: Final = (sys.executable, "-P", "-m", "torchelastic.run")
"""-P: a file beside the manifest that is called like a module of the agent's must not take its place."""

_CHECK: Final = (*_LAUNCHER, "--check")
"""Only says whether the rest of the line can be honoured."""

_NOT_INHERITED: Final = ("PET_", "TORCHELASTIC_")

_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class PodCommands:
    """Makes the commands of the pods of one run.

    Attributes:
        run: its folder.
        base: the manifest's folder.
        environ: the environment of ``elasticjob``.
    """

    run: RunFolder
    base: Path
    environ: Mapping[str, str]

    def command(self, job: Job, pod: NewPod, store: str, launcher: tuple[str, ...] = _LAUNCHER) -> PodCommand:
        """What the process of a pod is.

        Args:
            job: the job.
            pod: the pod.
            store: host:port of the store.
            launcher: the agent.
        """
        logs = self.run.pod_logs(pod.name)
        checkpoints = self.run.checkpoint(job.name, pod.index)
        termination_log = logs / "termination-log"
        surroundings = Surroundings(
            store=store,
            checkpoints=str(checkpoints),
            termination_log=str(termination_log),
            address=_LOOPBACK,
            metrics_port=0,
            launcher=launcher,
        )
        started = resolved(agent_command(job, pod, surroundings), user_env(job.spec))
        inherited = {name: value for name, value in self.environ.items() if not name.startswith(_NOT_INHERITED)}
        return PodCommand(
            argv=started.argv,
            env={**inherited, **started.env, "PET_LOG_DIR": str(logs)},
            folder=self.base,
            checkpoints=checkpoints,
            log=logs / "agent.log",
            termination_log=termination_log,
        )

    async def check(self, job: Job) -> None:
        """Ask the agent whether it can honour what its pods would be started with.

        Raises:
            BadInput: it can't; the message is its own.
        """
        size = SizeRecord(min=job.spec.min_replicas, max=job.spec.max_replicas)
        command = self.command(job, NewPod(job.name, 0, size), f"{_LOOPBACK}:1", _CHECK)
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            # Only the pods themselves have last words.
            env={name: value for name, value in command.env.items() if name != "TORCHELASTIC_TERMINATION_LOG"},
            cwd=command.folder,
        )
        try:
            _, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != ExitCode.SUCCEEDED:
            lines = said.decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise BadInput(lines[-1].removeprefix("torchelastic-run: "))
