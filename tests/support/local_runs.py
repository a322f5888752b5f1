"""`elasticjob run` processes, which tests watch through the control socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import aiohttp
import yaml

from elastic_operator.local.run_dir import RunDir
from tests.support.agents import AgentProcess, until_gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Snapshot = dict[str, Any]

LIMIT = 240.0
"""The limit of each wait in seconds, even on a busy machine."""

WAITS = "echo rank $RANK of $WORLD_SIZE; while [ ! -e {finish} ]; do sleep 0.05; done"
"""A worker that exits when a file exists; it is a shell, which starts faster than torch."""


class LocalRun(AgentProcess):
    """An `elasticjob run` process with its output; it runs within ``async with``.

    Args:
        home: the home folder, which also identifies the processes of the run.
        manifest: the manifest of the job.
        arguments: more arguments.
        environ: more variables.
    """

    program = ("-m", "elastic_operator.cli.main", "run", "--plain")
    settings: ClassVar[Mapping[str, str]] = {}

    def __init__(self, home: Path, manifest: Path, *arguments: str, environ: dict[str, str] | None = None) -> None:
        super().__init__(*arguments, manifest, env={"ELASTICJOB_HOME": str(home), **(environ or {})})
        self.home = home

    @property
    def record(self) -> Snapshot:
        """The record in the folder of the run of this process; the home may have several runs."""
        for file in self.home.glob("runs/*/job.json"):
            record: Snapshot = json.loads(file.read_bytes())
            if record["run"]["pid"] == self.process.pid:
                return record
        raise AssertionError(f"process {self.process.pid} has written no record; its output:\n{self.output}")

    async def exit_code(self) -> int:
        """Wait until the process exits, and return its exit code."""
        return await self.code()

    async def until(self, condition: Callable[[Snapshot], object], *, limit: float = LIMIT) -> Snapshot:
        """Wait for a snapshot that meets a condition, and return it.

        Raises:
            AssertionError: the run has ended without such a snapshot, or it took too long.
        """
        snapshot: Snapshot | None = None
        try:
            async with asyncio.timeout(limit):
                await self.wait_for_line("logs: ")  # the view prints it when the run serves its socket
                with RunDir(Path(self.record["run"]["directory"])).socket() as path:
                    connector = aiohttp.UnixConnector(path=path)
                    async with (
                        aiohttp.ClientSession(connector=connector, read_bufsize=1 << 22) as session,
                        session.get("http://localhost/watch", timeout=aiohttp.ClientTimeout(total=None)) as watch,
                    ):
                        async for line in watch.content:
                            snapshot = json.loads(line)
                            if condition(snapshot):
                                return snapshot
        except FileNotFoundError:
            why = "has ended"
        except TimeoutError:
            why = "took too long"
        except aiohttp.ClientError as error:
            why = f"broke off ({error})"
        else:
            why = "ended before"
        raise AssertionError(f"the run {why}; last snapshot: {json.dumps(snapshot, indent=1)}\n{self.output}")

    async def wait_until_training(self, workers: int, *, after: int = 0) -> Snapshot:
        """Wait until this number of workers trains in a round later than ``after``, and return the snapshot."""
        return await self.until(
            lambda snapshot: (
                snapshot["status"]["worldSize"] == workers
                and snapshot["status"]["round"] > after
                and snapshot["status"]["state"] == "Running"
                and len(training(snapshot)) * _workers_per_pod(snapshot) == workers
            )
        )


def manifest(folder: Path, name: str = "job", **spec: Any) -> Path:
    """Write a manifest whose worker waits for ``<folder>/finish`` unless the spec says otherwise."""
    written = {
        "image": "some/image",
        "minReplicas": 1,
        "maxReplicas": 3,
        "replicas": 2,
        "command": ["sh", "-c", WAITS.format(finish=folder / "finish")],
        **spec,
    }
    file = folder / f"{name}.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "elastic.pytorch.org/v1alpha1",
                "kind": "ElasticJob",
                "metadata": {"name": name},
                "spec": {key: value for key, value in written.items() if value is not None},
            }
        )
    )
    return file


def training(snapshot: Snapshot) -> list[Snapshot]:
    """Return the live pods that are members of the current round."""
    return [pod for pod in snapshot["pods"] if pod["ranks"] and pod["ended"] is None and not pod["terminating"]]


def reasons(snapshot: Snapshot) -> list[str]:
    """Return the reasons of the events, in order."""
    return [event["reason"] for event in snapshot["events"]]


def processes_of(home: Path) -> dict[int, str]:
    """Return the command lines of the processes that have this home folder in their environment, by process id."""
    mark = b"\0ELASTICJOB_HOME=" + os.fsencode(home) + b"\0"
    found = {}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdecimal() and mark in b"\0" + (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


async def gone(pids: Iterable[int], *, within: float) -> bool:
    """Wait until these processes have exited, and return whether they did so in time."""
    try:
        async with asyncio.timeout(within):
            for pid in pids:
                await until_gone(pid)
    except TimeoutError:
        return False
    return True


def _workers_per_pod(snapshot: Snapshot) -> int:
    return int(snapshot["manifest"]["spec"]["nprocPerNode"])
