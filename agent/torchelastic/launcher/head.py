"""The caller's side of a launch: starts a node on each host, passes calls and output on, and collects the results."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import queue
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol, cast

from torchelastic.agent.failures import describe_exit
from torchelastic.agent.workers.processes import python_code
from torchelastic.errors import SettingsError, TorchElasticError
from torchelastic.launcher.channel import Channel
from torchelastic.launcher.store import StoreService
from torchelastic.protocol.pod import LEFT_CODES, ExitCode
from torchelastic.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torchelastic.launcher.channel import Content
    from torchelastic.launcher.hosts import Host
    from torchelastic.launcher.log_handlers import Lines

Events = queue.SimpleQueue[tuple["Node | None", dict[str, Any] | None, Any]]

_EXIT_TIMEOUT: Final = 5.0
"""Seconds after which a node that does not exit is killed; its watchdog kills the rest."""

_REPORT_TIMEOUT: Final = 3.0
"""Seconds that the nodes of a failed job have to report the cause."""

_RECONNECT_TIMEOUT: Final = 30.0
"""Seconds to connect again to the agents whose results are missing after all others have ended."""

_IDLE_LIMIT: Final = 60.0
"""Seconds after which an idle node of this machine is closed."""

_SSH_OPTIONS: Final = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=2"),
)

_SRUN_VARIABLES: Final = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JWT")
"""Variables of SLURM that srun needs to find the controller and the allocation."""


class AgentFailedError(TorchElasticError):
    """An agent could not be started, or has died."""


class WorkerFailedError(TorchElasticError):
    """A worker has died, or has raised an exception that cannot be passed to the caller.

    Attributes:
        exit_code: the exit code of the worker, or the negative number of the signal that killed it.
    """

    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """What a worker returned, and where it ran."""

    host: str
    local_rank: int
    value: Any


class Node:
    """The agent of a host, as the launcher sees it; a thread reads its messages.

    Args:
        host: the name of the host.
        channel: the connection to the agent.
        events: receives (node, message, content); the message None means that the connection has ended.
        store: the store of the launch, if it is in the launcher's memory.

    Attributes:
        problem: why the connection has ended, if that is known.
    """

    def __init__(self, host: str, channel: Channel, events: Events, store: StoreService | None = None) -> None:
        self.host = host
        self.channel = channel
        self.events = events
        self.problem = ""
        self._store = store

    def start(self) -> None:
        """Read the messages in a thread."""
        threading.Thread(target=self._read, name="torchelastic: launcher", daemon=True).start()

    def close(self) -> None:
        """Ask the node to exit: its channel is closed."""
        self.channel.close()

    def wait(self) -> None:
        """Wait until the node has exited, after :meth:`close`."""

    @property
    def last_error(self) -> str:
        """Why the node has ended."""
        return self.problem or "the connection to it has ended"

    def _read(self) -> None:
        try:
            for message, content in self.channel.messages():
                match message["type"]:
                    case "store":
                        if self._store is not None:
                            self._store.take(self.channel, message)
                    case "result" if "file" in message:  # on this machine
                        with Path(message["file"]).open("rb") as file:
                            Path(message["file"]).unlink()
                            self.events.put((self, message, _unpickled(file)))
                    case "result":
                        self.events.put((self, message, _unpickled(content)))
                    case _:
                        self.events.put((self, message, content.read()))
        except EOFError:
            pass
        except ValueError:
            self.problem = "its shell prints text before the agent starts; let it print only in interactive sessions."
        if self._store is not None:
            self._store.lose(self.channel)
        self.close()  # a host that sends something else than messages must end, too
        self.wait()
        self.events.put((self, None, None))


class ProcessNode(Node):
    """The agent of this machine or, through ssh or srun, of another one.

    Args:
        argv: the command, whose standard input and output become the channel.

    Raises:
        AgentFailedError: the command cannot be started.
    """

    def __init__(self, host: Host, argv: list[str], events: Events, store: StoreService | None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    argv, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.PIPE, start_new_session=True
                )
            except OSError as error:
                ours.close()
                raise AgentFailedError(f"{argv[0]} cannot be started: {error.strerror}.") from None
        channel = Channel(os.dup(ours.fileno()), ours.detach(), pings=not host.is_local)
        super().__init__(host.name, channel, events, store)
        self._errors = b""
        self._errors_read = threading.Event()
        self.start()
        threading.Thread(target=self._read_errors, name="torchelastic: launcher", daemon=True).start()

    def wait(self) -> None:
        """Wait until the node has exited, after :meth:`close`; kill it if it takes too long."""
        try:
            self.process.wait(_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._errors_read.wait(1.0)  # a process that the host has left behind may keep the stream open

    @property
    def last_error(self) -> str:
        """Why the node has ended: the signal, or else a line of its standard error: that of SLURM, or the last one."""
        if self.problem:
            return self.problem
        lines, code = self._errors.decode(errors="replace").strip().splitlines(), self.process.wait()
        lines = [line for line in lines if " CANCELLED AT " in line] or lines  # also at the end of the time limit
        return lines[-1] if lines and code >= 0 else describe_exit(code)

    def _read_errors(self) -> None:
        with cast("IO[bytes]", self.process.stderr) as stream:
            while data := os.read(stream.fileno(), 1 << 16):
                self._errors = (self._errors + data)[-(1 << 14) :]
                self.events.put((self, {"type": "agent"}, data))
        self._errors_read.set()


class Cluster(Protocol):
    """Hosts that come and go during a launch: the pods of a job.

    Attributes:
        job: the name of the job.
        hosts: the names of the pods' hosts; there may be fewer at any time.
    """

    job: str
    hosts: Sequence[str]

    def nodes(self, events: Events) -> AbstractContextManager[None]:
        """Return a context that starts the nodes, and at its end removes what it has made.

        Each node is announced by its message "connected". Messages of the node None: "failed" has the reason why no
        node will come any more, and "waiting" the reason why no more nodes have come yet.
        """


def _unpickled(content: Content | IO[bytes]) -> Any:  # noqa: ANN401 - the function's own value
    """Return the object that arrives, or :class:`_Unreadable` with the exception of its code."""
    try:
        return pickle.load(content)  # noqa: S301 - from a worker of this launch
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised to the caller of the launch
        content.read()  # raises EOFError if the connection is closed
        return _Unreadable(error)


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """A result that cannot be unpickled."""

    error: BaseException


def command_for(host: Host, *, python: str | None, ssh_config_file: str | None) -> list[str]:
    """Return the command that starts a node on a host."""
    if host.is_local:
        return (
            python_code("torchelastic.launcher.node")
            if python is None
            else [python, "-m", "torchelastic.launcher.node"]
        )
    if host.start == "srun":
        return [*_srun(host.name), python or sys.executable, "-m", "torchelastic.launcher.node"]
    config = [] if ssh_config_file is None else ["-F", ssh_config_file]
    remote = shlex.join([python or sys.executable, "-m", "torchelastic.launcher.node"])
    return ["ssh", *_SSH_OPTIONS, *config, "--", host.name, f"exec {remote}"]


def _srun(name: str) -> list[str]:
    """Return the command of a job step that has all CPUs, GPUs and memory of the allocation on a node.

    Without the variables of SLURM, srun has no options of the job, such as the number of GPUs for each of its tasks.
    """
    unset = [each for each in os.environ if each.startswith(("SLURM_", "SRUN_")) and each not in _SRUN_VARIABLES]
    options = ["--nodes=1", "--ntasks=1", f"--nodelist={name}", "--overlap", "--cpu-bind=none", "--mem=0"]
    return ["env", *(f"--unset={each}" for each in unset), "srun", *options, "--unbuffered", "--export=ALL"]


# -- idle nodes of this machine

_idle: Final[dict[object, tuple[ProcessNode, threading.Timer]]] = {}
_idle_lock: Final = threading.Lock()


def _take_idle(key: object, events: Events) -> ProcessNode | None:
    with _idle_lock:
        node, timer = _idle.pop(key, (None, None))
    if timer is not None:
        timer.cancel()
    if node is None:
        return None
    node.events = events
    return node if node.process.poll() is None else None  # its end is an event if it exits later


def _keep_idle(key: object, node: ProcessNode) -> None:
    timer = threading.Timer(_IDLE_LIMIT, _close_idle, [key, node])
    timer.daemon = True
    with _idle_lock:
        others = [*_idle.values()]  # at most one node stays, because each has imported torch
        _idle.clear()
        _idle[key] = node, timer
        timer.start()
    for other, other_timer in others:
        other_timer.cancel()
        other.close()


def _close_idle(key: object, node: ProcessNode) -> None:
    with _idle_lock:
        if _idle.get(key, (None,))[0] is node:
            del _idle[key]
    node.close()


@atexit.register
def _close_all_idle() -> None:
    _end([node for node, _ in _idle.values()])


def _end(nodes: Sequence[Node]) -> None:
    for node in nodes:
        node.close()
    for node in nodes:
        node.wait()


# -- a launch


@dataclass
class Head:
    """Runs one call on a set of nodes.

    Attributes:
        hosts: the hosts; without effect if there is a cluster.
        opened: the first message for all nodes, without what differs between them.
        code: an archive with the modules of the caller; empty if the hosts have them.
        command: returns the command that starts a node on a host.
        lines: takes the output.
        keep_warm: whether a node of this machine stays for the next launch with the same settings.
        min_hosts: the number of hosts that must remain.
        cluster: the pods on which to run the call; None to run it on ``hosts``.
    """

    hosts: Sequence[Host]
    opened: Mapping[str, Any]
    code: bytes
    command: Callable[[Host], list[str]]
    lines: Lines
    keep_warm: bool
    min_hosts: int
    cluster: Cluster | None = None

    def run(self, call: bytes) -> dict[int, Result]:
        """Run the call, and return the results by rank.

        Raises:
            AgentFailedError: a node could not be started, or has died.
            WorkerFailedError: a worker has died.
            Exception: a worker raised it.
        """
        results = self._run_on_cluster(self.cluster, call) if self.cluster is not None else self._run_on_hosts(call)
        if isinstance(results, BaseException):
            raise results
        return results

    def _run_on_cluster(self, cluster: Cluster, call: bytes) -> dict[int, Result] | BaseException:
        events: Events = queue.SimpleQueue()

        def connected(node: Node) -> None:
            node.channel.send(dict(self.opened), self.code)
            node.channel.send({"type": "call"}, call)

        with contextlib.ExitStack() as stack:
            stack.callback(self.lines.flush)
            stack.enter_context(cluster.nodes(events))
            return _Collector((), self.lines, 0, _Progress(len(cluster.hosts)), connected).collect(events)

    def _run_on_hosts(self, call: bytes) -> dict[int, Result] | BaseException:
        key = self._key() if self._may_stay() else None
        events: Events = queue.SimpleQueue()
        nodes: list[ProcessNode] = []
        with contextlib.ExitStack() as stack:
            stack.callback(self.lines.flush)
            store = stack.enter_context(StoreService()) if len(self.hosts) > 1 else None
            stack.callback(_end, nodes)
            for index, host in enumerate(self.hosts):
                node = _take_idle(key, events) if key is not None else None
                if node is None:
                    node = ProcessNode(host, self.command(host), events, store)
                    own = {
                        "index": index,
                        "workers": host.workers,
                        "remote": not host.is_local,
                        "ssh": host.start == "ssh" and not host.is_local,
                    }
                    node.channel.send({**self.opened, **own}, self.code)
                nodes.append(node)
                node.channel.send({"type": "call"}, call)
            remote = [host for host in self.hosts if not host.is_local]
            progress = _Progress(len(self.hosts) if remote else 0)
            results = _Collector(nodes, self.lines, self.min_hosts, progress).collect(events)
            if key is not None:
                _keep_idle(key, nodes.pop())
        return results

    def _may_stay(self) -> bool:
        """Whether the node may serve another launch; it reads code and env_file, which may change, only once."""
        fixed = not (self.code or self.opened["env_file"])
        return self.keep_warm and fixed and len(self.hosts) == 1 and self.hosts[0].is_local

    def _key(self) -> object:
        [host] = self.hosts
        settings = {name: value for name, value in self.opened.items() if name != "run_id"}
        return repr((os.getpid(), Path.cwd(), self.command(host), sorted(os.environ.items()), host, settings))


class _Progress:
    """A line on the launcher's terminal while hosts connect; it disappears when all have, or a worker writes a line.

    Args:
        hosts: the number of hosts; 0 for no line.
    """

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._connected = 0
        self._shown = bool(hosts and sys.stderr is not None and sys.stderr.isatty())
        self.show()

    def show(self, waiting: str = "") -> None:
        """Show the line, with the reason why no more hosts have connected yet."""
        if self._shown:
            line = f"{self._connected} of {self._hosts} hosts are connected{waiting and f': {waiting}'}"
            printable = "".join(each if each.isprintable() else " " for each in line)
            sys.stderr.write(f"\r\x1b[K{printable[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()

    def add(self) -> None:
        """Count a host that has connected."""
        self._connected += 1
        self.show()
        if self._connected >= self._hosts:
            self.close()

    def clear(self) -> None:
        """Clear the line, so that another line can be written."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def close(self) -> None:
        """Clear the line, and show it no more."""
        self.clear()
        self._shown = False


class _Collector:
    """Handles the messages of the nodes until the run has ended on all of them.

    Args:
        nodes: the nodes.
        lines: takes the output.
        min_hosts: the number of nodes that must remain.
        progress: shows how many nodes have connected.
        connected: called with each node that a cluster announces; None if the nodes are known.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        lines: Lines,
        min_hosts: int,
        progress: _Progress,
        connected: Callable[[Node], None] | None = None,
    ) -> None:
        self._running = dict.fromkeys(nodes)
        self._lines = lines
        self._min_hosts = min_hosts
        self._progress = progress
        self._connected = connected
        self._results: dict[int, Result] = {}
        self._size = 0
        self._failure: tuple[int, BaseException] | None = None
        self._hopeless: tuple[float, str] | None = None

    def collect(self, events: Events) -> dict[int, Result] | BaseException:
        """Return the results, or the exception of the worker that failed first; raise AgentFailedError."""
        with contextlib.closing(self._progress):
            self._collect(events)
        if self._failure is not None:
            return self._failure[1]
        if self._missing:
            raise self._lost_result()
        return dict(sorted(self._results.items()))

    @property
    def _missing(self) -> set[int]:
        return {*range(self._size)} - self._results.keys()

    def _lost_result(self) -> AgentFailedError:
        rank = min(self._missing)
        return AgentFailedError(f"The agent of rank {rank} was lost before the result of the function had arrived.")

    def _collect(self, events: Events) -> None:
        while self._running or (
            self._connected is not None and self._failure is None and (not self._size or self._missing)
        ):
            node, message, content = self._next(events)
            if node is None:
                if message is not None and message["type"] == "waiting":
                    self._progress.show(message["message"])
                elif message is not None and self._hopeless is None:
                    wait = _REPORT_TIMEOUT if self._running else 0.0
                    self._hopeless = time.monotonic() + wait, message["message"]
            elif message is None:
                self._lost(node)
            else:
                self._take(node, message, content)

    def _take(self, node: Node, message: Mapping[str, Any], content: Any) -> None:  # noqa: ANN401 - bytes, or a result
        match message["type"]:
            case "output":
                self._progress.close()
                self._lines.write(node.host, message["local_rank"], message["stream"], content)
                node.channel.send({"type": "handled", "size": len(content)})
            case "agent":
                self._progress.clear()
                self._lines.write(node.host, None, 2, content)
            case "connected" if self._connected is not None:
                self._running[node] = None
                self._connected(node)
            case "hello":
                _check_versions(node, message)
                self._progress.add()
            case "refused":
                raise SettingsError(f"{node.host}: {message['message']}")
            case "result":
                if isinstance(content, _Unreadable):
                    raise WorkerFailedError(
                        f"The result of rank {message['rank']} on {node.host} cannot be unpickled: "
                        f"{type(content.error).__name__}: {content.error}."
                    ) from content.error
                self._results[message["rank"]] = Result(node.host, message["local_rank"], content)
            case "ended":
                self._running.pop(node, None)
                self._ended(node, message, content)
                if self._connected is not None:
                    node.close()  # all has arrived, so the pod may exit

    def _next(self, events: Events) -> tuple[Node | None, dict[str, Any] | None, Any]:
        if self._hopeless is None:
            if self._running or not self._size:
                return events.get()
            try:  # the others have ended; the launch connects again to an agent whose connection has broken
                return events.get(timeout=_RECONNECT_TIMEOUT)
            except queue.Empty:
                raise self._lost_result() from None
        until, message = self._hopeless
        try:  # the nodes may still report why
            return events.get(timeout=max(until - time.monotonic(), 0.0))
        except queue.Empty:
            raise (self._failure[1] if self._failure is not None else AgentFailedError(message)) from None

    def _lost(self, node: Node) -> None:
        if self._running.pop(node, self) is self:
            return
        if len(self._running) < self._min_hosts:
            raise AgentFailedError(f"The agent on {node.host} has ended: {node.last_error}")

    def _ended(self, node: Node, message: Mapping[str, Any], content: bytes) -> None:
        if message["code"] == ExitCode.SUCCEEDED:
            self._size = max(self._size, message["world_size"])
            return
        if self._connected is not None and message["code"] in LEFT_CODES:  # the pod is deleted; the others go on
            return
        if "rank" not in message:
            error: BaseException = AgentFailedError(f"{node.host}: {message['message']}")
        elif content:
            error = _exception_of(content, message, node)
        else:
            error = WorkerFailedError(message["message"])
            error.exit_code = message["exit_code"]
        weight = bool(content) + bool(message.get("own")) + ("rank" in message)
        if self._failure is None or weight > self._failure[0]:
            self._failure = weight, error


def _exception_of(content: bytes, message: Mapping[str, Any], node: Node) -> BaseException:
    """Return the exception of a worker, or one with its text if it cannot be unpickled."""
    trace, error = message["message"], None
    with contextlib.suppress(Exception, SystemExit):  # the file is incomplete, or the exception's own code fails
        trace, pickled = pickle.loads(content)  # noqa: S301 - from a worker of this launch
        error = pickle.loads(pickled)  # noqa: S301 - likewise
    if not isinstance(error, BaseException):
        error = WorkerFailedError(message["message"])
    error.add_note(f"Raised by rank {message['rank']} on {node.host}:\n{trace.rstrip()}")
    return error


def _check_versions(node: Node, message: Mapping[str, Any]) -> None:
    ours = __version__, [*sys.version_info[:2]]
    theirs = message["version"], [*message["python"]]
    if ours != theirs:
        raise AgentFailedError(
            f"{node.host} has torchelastic {theirs[0]} on Python {'.'.join(map(str, theirs[1]))}, and this "
            f"program has torchelastic {ours[0]} on Python {'.'.join(map(str, ours[1]))}: install the same versions."
        )
