"""The agent of one host of a launch: ``python -m torchelastic.launcher.node``, with a channel as its standard streams.

The first message of the launcher opens the node, which then starts its fork server. Each further message is a call,
which the node's workers make. Between calls, no worker runs. When the launcher closes the channel or dies, the node
leaves the run and exits, and no process of it remains.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import threading
from typing import IO, TYPE_CHECKING, Any, Final

from torchelastic.agent.function_call import (
    CALL_MODULE,
    code_folder,
    exception_file,
    remove_results,
    result_file,
    write_call,
)
from torchelastic.agent.workers.pool import Workers
from torchelastic.config import machine
from torchelastic.config.parse import count_workers
from torchelastic.config.parsers import RawValue
from torchelastic.config.settings import AgentSettings, LogSettings, Program, ProgramKind, RendezvousSettings
from torchelastic.errors import SettingsError, TorchElasticError
from torchelastic.launcher.channel import PING_TIMEOUT, Channel
from torchelastic.protocol.pod import ExitCode
from torchelastic.protocol.records import SizeRecord
from torchelastic.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torchelastic.agent.agent import Agent
    from torchelastic.agent.failures import ExitStatus
    from torchelastic.launcher.store import ChannelStore

_OUTPUT_LIMIT: Final = 1 << 20
"""Number of bytes of the workers' output that the launcher has not handled, after which the node reads no more."""

_STOP_TIMEOUT: Final = 2.0
"""Seconds between SIGTERM and SIGKILL for the workers if the launcher stops or dies."""

_EXIT_TIMEOUT: Final = 4.0
"""Seconds after which a node without a launcher exits in any case; the watchdog then kills its workers."""

_SSH_PORT: Final = 22


class ChannelOutput:
    """Sends the workers' output to the launcher; see :class:`~torchelastic.agent.worker_output.OutputConsumer`."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._unhandled = 0

    def connect(self, channel: Channel) -> None:
        """Send the output to this launcher from now on; output without a launcher is dropped."""
        self._channel = channel
        self._unhandled = 0

    def write(self, descriptor: int, output: bytes, prefix: bytes = b"", source: object = None) -> None:  # noqa: ARG002 - the interface
        """Send output of the worker whose local rank is the prefix."""
        if self._channel is not None:
            self._unhandled += len(output)
            self._channel.send({"type": "output", "local_rank": int(prefix), "stream": descriptor}, output)

    @property
    def full(self) -> bool:
        """Whether the launcher has to handle output first."""
        return self._unhandled > _OUTPUT_LIMIT

    def handled(self, size: int) -> None:
        """Record that the launcher has handled this number of bytes."""
        self._unhandled -= size

    async def close(self, *, idle_timeout: float, timeout: float) -> None:  # noqa: ASYNC109 - bounds the wait
        """Do nothing: the channel sends what is queued."""


class Inbox:
    """The messages of a launcher, which a thread reads.

    Args:
        channel: the channel to the launcher.
        output: the output of the workers, which the launcher acknowledges.
        lost: called in the thread when the launcher has closed the channel, or has died.

    Attributes:
        messages: the messages with their contents; None at the end.
        store: the store of the launch, if it is in the launcher's memory.
    """

    def __init__(self, channel: Channel, output: ChannelOutput, lost: Callable[[], None]) -> None:
        self._channel = channel
        self._output = output
        self._lost = lost
        self.messages: asyncio.Queue[tuple[dict[str, Any], bytes] | None] = asyncio.Queue()
        self.store: ChannelStore | None = None
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, ValueError):
            for message, content in self._channel.messages():
                self._loop.call_soon_threadsafe(self._take, message, content.read())
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.messages.put_nowait, None)
        self._lost()

    def _take(self, message: dict[str, Any], content: bytes) -> None:
        match message["type"]:
            case "handled":
                self._output.handled(message["size"])
            case "store":
                if self.store is not None:
                    self.store.take(message)
            case "ping":
                pass
            case _:
                self.messages.put_nowait((message, content))


class Node:
    """Runs the calls of a launch on this host; `channel` is the connection to the launcher."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._output = ChannelOutput()
        self._output.connect(channel)
        self._inbox = Inbox(channel, self._output, self._lost)

    async def run(self) -> None:
        """Run the calls until the launcher closes the channel."""
        watching = None
        try:
            if (first := await self._inbox.messages.get()) is not None:
                settings = _settings(first[0])
                watching = asyncio.create_task(self._watch()) if first[0]["remote"] else None
                async with Workers(settings, output=self._output) as workers:
                    extract_code(first[1], workers.scratch)
                    await self._take_calls(settings, workers, is_local=not first[0]["remote"])
        except TorchElasticError as error:
            self._channel.send({"type": "refused", "message": f"{error}"})
        if watching is not None:
            watching.cancel()
        self._channel.close()
        await asyncio.to_thread(self._channel.join)

    async def _watch(self) -> None:
        await self._channel.silence()
        self._lost()

    def _lost(self) -> None:
        threading.Timer(_EXIT_TIMEOUT, os._exit, [1]).start()
        os.kill(os.getpid(), signal.SIGTERM)  # the agent leaves the run

    async def _take_calls(self, settings: AgentSettings, workers: Workers, *, is_local: bool) -> None:
        # Import these modules while the fork server imports torch.
        from torchelastic.agent.agent import Agent
        from torchelastic.launcher.store import ChannelStore
        from torchelastic.metrics.agent import AgentMetrics

        connect = None
        if settings.rendezvous.size.max > 1:
            store = self._inbox.store = ChannelStore(self._channel)

            async def connect() -> ChannelStore:
                return store

        while (item := await self._inbox.messages.get()) is not None:
            write_call(workers.scratch, item[1])
            agent = Agent(settings, AgentMetrics(settings.role), connect)
            ending = await agent.run(workers)
            report(self._channel, agent, ending, workers.scratch, is_local=is_local)


def greet(channel: Channel) -> None:
    """Send the versions of this node, which the launcher compares with its own."""
    channel.send({"type": "hello", "version": __version__, "python": sys.version_info[:2]})


def extract_code(archive: bytes, scratch: Path) -> None:
    """Extract the modules of the caller; without effect if the archive is empty."""
    if archive:
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            opened.extractall(code_folder(scratch), filter="data")


def report(channel: Channel, agent: Agent, ending: ExitStatus, scratch: Path, *, is_local: bool = False) -> None:
    """Send the results of the workers, or the exception of the worker that is the root cause.

    A launcher on this machine (`is_local`) gets the path of each result instead, and removes the file.
    """
    failure = ending.message.failure
    ended = {
        "type": "ended",
        "code": int(ending.code),
        "message": ending.message.message,
        "world_size": agent.world_size,
    }
    if agent.ranks is not None and ending.code is ExitCode.SUCCEEDED:
        round, ranks = agent.ranks
        for local_rank, rank in enumerate(ranks):
            result: dict[str, Any] = {"type": "result", "rank": rank, "local_rank": local_rank}
            path = result_file(scratch, round, rank)
            if is_local and path.exists():
                channel.send({**result, "file": f"{path}"})
                continue
            value: bytes | IO[bytes] = pickle.dumps(None)  # if the worker has called sys.exit(0)
            with contextlib.suppress(FileNotFoundError):
                value = path.open("rb")
                path.unlink()  # a later call has a file of the same name
            channel.send(result, value)
    content = b""
    if failure is not None:
        ended |= {"rank": failure.rank, "exit_code": failure.exit_code, "own": agent.is_own(failure)}
        path = exception_file(scratch, failure.round, failure.rank)
        if ended["own"] and path.exists():
            content = path.read_bytes()
    if ending.code is not ExitCode.SUCCEEDED:
        remove_results(scratch)
    channel.send(ended, content)


def _settings(opened: Mapping[str, Any]) -> AgentSettings:
    """Return the settings of the agent from the launcher's first message, which may also change this process."""
    own = {"CUDA_VISIBLE_DEVICES"} if "SLURM_STEP_GPUS" in os.environ else set()  # SLURM has chosen this host's GPUs
    os.environ.update({name: value for name, value in opened["environment"].items() if name not in own})
    with contextlib.suppress(OSError):  # a host may not have the caller's folder
        os.chdir(opened["directory"])
    if opened["env_file"]:
        os.environ.update(env_file_variables(opened["env_file"]))
    hosts, index = opened["hosts"], opened["index"]
    connection = os.environ.get("SSH_CONNECTION", "").split() if opened["ssh"] else []
    if len(hosts) == 1:
        address = "127.0.0.1"
    elif len(connection) == 4:
        address = connection[2]  # of this host, as the launcher reaches it
    else:
        address = machine.own_address(f"{host}:{_SSH_PORT}" for host in hosts if host != hosts[index])
    size = SizeRecord(min=opened["min_hosts"], max=len(hosts), desired=len(hosts))
    return AgentSettings(
        rendezvous=RendezvousSettings(
            opened["run_id"],
            size,
            max_restarts=opened["max_restarts"],
            join_timeout=opened["agent_timeout"],
            lease=PING_TIMEOUT,  # the store ends with the launcher, and knows at once which channels have ended
        ),
        store=None,
        node_name=hosts[index],
        node_rank=index,
        address=address,
        program=Program(ProgramKind.MODULE, (CALL_MODULE,)),
        workers=count_workers(RawValue("workers_per_host", f"{opened['workers']}"), os.environ),
        logs=LogSettings(prefix=True, log_line_prefix_template="${local_rank}"),
        shutdown_timeout=_STOP_TIMEOUT,
        heartbeat_timeout=opened["heartbeat_timeout"],
    )


def env_file_variables(path: str) -> dict[str, str]:
    """Return the variables that a script of bash sets, whether it exports them or not.

    Raises:
        SettingsError: bash is missing, or the script fails.
    """
    script = 'set -a; . "$1" >&2 || exit; exec env -0'
    try:
        done = subprocess.run(["bash", "-c", script, "bash", path], capture_output=True, check=True)  # noqa: S607
    except OSError as error:
        raise SettingsError(f"bash, which reads env_file, cannot be started: {error.strerror}.") from None
    except subprocess.CalledProcessError as error:
        raise SettingsError(f"env_file {path} fails: {error.stderr.decode(errors='replace').strip()}") from None
    pairs = (os.fsdecode(each).partition("=") for each in done.stdout.split(b"\0") if each)
    return {name: value for name, _, value in pairs if name not in {"_", "PWD", "OLDPWD", "SHLVL"}}


def main() -> None:
    """Run the node; its standard input and output are the channel."""
    channel = Channel(os.dup(0), os.dup(1))
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a descriptor
        os.dup2(nothing.fileno(), 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the agent handles it
    os.dup2(2, 1)  # nothing else may write to the channel
    greet(channel)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(asctime)s %(message)s")

    async def run() -> None:
        await Node(channel).run()

    asyncio.run(run())


if __name__ == "__main__":
    main()
