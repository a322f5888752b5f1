"""From a command line and an environment to :class:`~torchelastic.settings.AgentSettings`.

Everything that can be known to be wrong before anything is started is said here, in one sentence that names the flag or
variable. What ``torchrun`` leaves to chance is decided:

* A run of one node needs neither an etcd nor an id. A run of several needs both: torchrun's common default id makes
  strangers meet.
* ``--node-rank``, ``--master-addr`` and ``--master-port`` are ignored with a warning. Scripts written for one machine
  pass them out of habit (to avoid a taken port), and work without them; where several nodes are asked for and no etcd
  is named, the error mentions them.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil
import socket
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchelastic import flags, machine
from torchelastic.contract import CONTRACT_VERSION, Env
from torchelastic.errors import SettingsError
from torchelastic.flags import CommandLine, Given
from torchelastic.job_arguments import read_job, read_job_created
from torchelastic.rendezvous_arguments import read_backend, read_conf, read_rendezvous, read_size, read_store
from torchelastic.settings import AgentSettings, LogSettings, Program, ProgramKind, StartMethod, Streams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchelastic.contract import SizeRecord
    from torchelastic.store.api import StoreSettings

_log: Final = logging.getLogger(__name__)

_MAX_WORKERS: Final = 10_000
_NAME_LIMIT: Final = 253
_NODE_NAME_LIMIT: Final = 240
"""Of a node's id, which is its name and what tells one life of it from the next, no more is taken than of a name."""
_STATIC: Final = ("node-rank", "master-addr", "master-port")


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> AgentSettings:
    """What the agent is asked to do.

    Args:
        argv: the command line without the name of the command.
        environ: torchrun's PET_* variables and the operator's (:class:`~torchelastic.contract.Env`) are read from here.

    Raises:
        SettingsError: it cannot be honoured; the message says what to change.
        SystemExit: after ``--help`` or ``--version``.
    """
    _check_contract(environ)  # before the flags, among which may be some that only the other version knows
    line = flags.read(argv, environ)
    size = read_size(line, environ)
    store = _store(line, size)
    rendezvous = read_rendezvous(line, environ, size=size, conf=read_conf(line))
    workers = _workers(line, environ)
    settings = AgentSettings(
        rendezvous=rendezvous,
        store=store,
        node_name=_node_name(line, environ),
        address=_address(line, environ, store),
        program=_program(line),
        workers=workers,
        logs=_logs(line, workers),
        place=_place(line),
        interface=_interface(line),
        job=read_job(environ),
        job_created=read_job_created(environ),
        **_optional(line, environ),
    )
    _warn_of_ignored(line, environ, size)
    return settings


def _optional(line: CommandLine, environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings that have a default of their own, as far as they were given."""
    found: dict[str, Any] = {}
    if (role := line.get("role")) is not None:
        found["role"] = _name(role)
    if (grace := line.get("stop-grace")) is not None:
        found["stop_grace"] = grace.seconds(zero=True)
    if (timeout := line.get("stop-timeout")) is not None:
        found["stop_timeout"] = timeout.seconds(zero=True)
    if (silence := line.get("heartbeat-timeout")) is not None:
        found["heartbeat_timeout"] = silence.seconds()
    found.update(_declared_exit_codes(line))
    if (port := line.get("metrics-port") or _variable(environ, Env.METRICS_PORT)) is not None:
        found["metrics_port"] = port.integer(0, 65535)
    if (last_words := line.get("termination-log") or _variable(environ, Env.TERMINATION_LOG)) is not None:
        found["termination_log"] = Path(last_words.text)
    if (interval := line.get("monitor-interval")) is not None:
        interval.seconds()
    return found


def _check_contract(environ: Mapping[str, str]) -> None:
    spoken = environ.get(Env.CONTRACT)
    if spoken and spoken.strip() != str(CONTRACT_VERSION):
        raise SettingsError(
            f"The operator speaks version {spoken} of the contract between operator and agents, this agent version "
            f"{CONTRACT_VERSION}: use an image with an agent of the operator's release, or upgrade the operator."
        )


def _store(line: CommandLine, size: SizeRecord) -> StoreSettings | None:
    """Where the nodes meet; None for a run of this node alone."""
    if line.has("standalone"):
        if size.max > 1:
            raise SettingsError(
                f"--standalone is a run of one node, but up to {size.max} are asked for: leave out one of the two, or "
                "name an etcd with --rdzv-endpoint in place of --standalone."
            )
        return None
    version = read_backend(line)
    if (endpoint := line.get("rdzv-endpoint")) is not None:
        return read_store(endpoint, read_conf(line), version=version)
    if size.max > 1:
        static = [given.source for name in _STATIC if (given := line.get(name)) is not None]
        habit = f" ({' and '.join(static)} can't do that here: the nodes meet in an etcd)" if static else ""
        raise SettingsError(
            f"A run of up to {size.max} nodes needs an etcd where they meet: name it with --rdzv-endpoint "
            f"HOST:2379{habit}."
        )
    return None


def _warn_of_ignored(line: CommandLine, environ: Mapping[str, str], size: SizeRecord) -> None:
    """Say what was given and has no effect, once everything else is known to be right."""
    ignored = [given.source for name in _STATIC if (given := line.get(name)) is not None]
    if ignored:
        _log.warning("%s ignored: the nodes agree on ranks and addresses by themselves.", " and ".join(ignored))
    if line.has("standalone") and (endpoint := line.get("rdzv-endpoint")) is not None:
        _log.warning("%s ignored: --standalone needs no etcd.", endpoint.source)
    if environ.get(Env.SIZE) and (nodes := line.get("nnodes")) is not None:
        without_operator = {key: text for key, text in environ.items() if key != Env.SIZE}
        asked = read_size(line, without_operator)
        if (asked.min, asked.max) != (size.min, size.max):
            _log.warning(
                "%s=%s ignored: the operator says how many nodes there are, %d to %d (minReplicas, maxReplicas).",
                nodes.source,
                nodes.text,
                size.min,
                size.max,
            )


def _variable(environ: Mapping[str, str], name: str) -> Given | None:
    text = environ.get(name)
    return Given(name, text) if text else None


def _name(given: Given, limit: int = _NAME_LIMIT) -> str:
    name = given.text.strip()
    if not name or len(name) > limit or not name.isprintable():
        raise given.refused(f"this is a name of 1 to {limit} printable characters")
    return name


def _node_name(line: CommandLine, environ: Mapping[str, str]) -> str:
    given = line.get("node-name") or _variable(environ, Env.NODE_NAME)
    return socket.gethostname() if given is None else _name(given, _NODE_NAME_LIMIT)


def _address(line: CommandLine, environ: Mapping[str, str], store: StoreSettings | None) -> str:
    given = line.get("local-addr") or _variable(environ, Env.NODE_ADDRESS)
    if given is not None:
        address = given.text.strip().removeprefix("[").removesuffix("]")
        pattern = r"[\w.-]+|[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(%[\w.-]+)?"
        if len(address) > _NAME_LIMIT or not re.fullmatch(pattern, address):
            raise given.refused("this is a host name or an IP address, without a port")
        return address
    return "127.0.0.1" if store is None else machine.own_address(store.endpoints)


def _interface(line: CommandLine) -> str:
    """The interface of the address that was chosen for this node; of one that was only found out nothing follows."""
    given = line.get("local-addr")
    return "" if given is None else machine.interface_of(given.text.strip().removeprefix("[").removesuffix("]"))


def _place(line: CommandLine) -> str:
    given = line.get("place")
    return machine.host_id() if given is None else _name(given)


def _declared_exit_codes(line: CommandLine) -> dict[str, frozenset[int]]:
    """What exit codes of workers stand for something, by the name of the setting."""
    final, free = line.get("final-exit-codes"), line.get("free-exit-codes")
    found = {
        name: _exit_codes(given)
        for name, given in (("final_exit_codes", final), ("free_exit_codes", free))
        if given is not None
    }
    if final is not None and free is not None and (both := found["final_exit_codes"] & found["free_exit_codes"]):
        raise free.refused(f"{min(both)} is in {final.source}, too; leave it out of one of the two")
    return found


def _exit_codes(given: Given) -> frozenset[int]:
    found: set[int] = set()
    for part in given.text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,3})(?:\s*-\s*([0-9]{1,3}))?\s*", part)
        first, last = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 1 <= first <= last <= 255:
            raise given.refused(
                "these are exit codes from 1 to 255 with commas between them, or ranges of them, for example "
                "2,64-78,137, where 128 + n is signal n"
            )
        found.update(range(first, last + 1))
    return frozenset(found)


def _workers(line: CommandLine, environ: Mapping[str, str]) -> int:
    """How many workers this node runs."""
    given = line.get("nproc-per-node")
    if given is None:
        return 1
    match given.text.strip().lower():
        case "cpu":
            return machine.cpu_count()
        case "gpu":
            if (gpus := machine.gpu_count(environ)) == 0:
                raise given.refused("no GPU is to be seen here; ask for cpu, auto or a number")
            return gpus
        case "auto":
            return machine.gpu_count(environ) or machine.cpu_count()
        case text if text.lstrip("-").isdecimal():
            return given.integer(1, _MAX_WORKERS)
        case _:
            raise given.refused("this is a number of workers, or auto, cpu or gpu")


def _program(line: CommandLine) -> Program:
    """What the workers run."""
    argv = line.program
    if not argv or not argv[0]:
        raise SettingsError(f"The program is missing: {flags.PROGRAM_NAME} [FLAG …] PROGRAM [ARGUMENT …].")
    method = _start_method(line)
    if line.has("no-python"):
        if line.has("module"):
            raise SettingsError("--no-python and --module can't be given together: a module is always Python.")
        # Only this form needs it, and it belongs to the part of the agent that starts workers.
        from torchelastic.agent.program import program_of_command

        program = dataclasses.replace(program_of_command(argv), start_method=method)
    else:
        program = Program(ProgramKind.MODULE if line.has("module") else ProgramKind.SCRIPT, argv, method)
    _check_exists(program, is_command=line.has("no-python"))
    if (preload := line.get("preload")) is not None:
        program = dataclasses.replace(program, preload=_preload(preload, program))
    return program


def _preload(given: Given, program: Program) -> tuple[str, ...]:
    from torchelastic.agent.run_program import search_path  # as above

    names = tuple(dict.fromkeys(filter(None, (part.strip() for part in given.text.split(",")))))
    is_python = program.kind is not ProgramKind.COMMAND
    first = (search_path(program.kind.value, program.argv[0]) if is_python else "") or str(Path.cwd())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise given.refused("these are names of modules with commas between them, for example numpy,PIL.Image")
        if not _has_module(name, first):
            raise given.refused(f"there is no module {name} (looked up from {first} and by {sys.executable})")
    return names


def _has_module(name: str, first: str) -> bool:
    """Whether a module's package is there, in this folder or where the interpreter looks: nothing of it is run."""
    package = name.partition(".")[0]
    return package in sys.builtin_module_names or PathFinder.find_spec(package, [first, *sys.path]) is not None


def _check_exists(program: Program, *, is_command: bool) -> None:
    """What cannot be found is said before anything is started, not by each worker on its own."""
    name = program.argv[0]
    if program.kind is ProgramKind.MODULE:
        if not _has_module(name, str(Path.cwd())):  # where `python -m` looks first
            raise SettingsError(f"There is no module {name} (looked up from {Path.cwd()} and by {sys.executable}).")
    elif program.kind is ProgramKind.SCRIPT:
        # Not by pathlib, which raises where a path is too long or leads through a folder that is not ours to enter.
        if os.path.isfile(name):  # noqa: PTH113
            if not os.access(name, os.R_OK):
                raise SettingsError(f"The script {name} cannot be read by the user that runs this.")
            return
        if os.path.isdir(name):  # noqa: PTH112
            if os.path.isfile(os.path.join(name, "__main__.py")):  # noqa: PTH113, PTH118
                return
            raise SettingsError(f"{name} is a folder without a __main__.py: name the Python file in it.")
        if not is_command and shutil.which(name):
            raise SettingsError(
                f"There is no script {name} here; to run the command {name}, put --no-python before it."
            )
        raise SettingsError(f"There is no script {name} (looked up from {Path.cwd()}).")
    elif not shutil.which(name):
        raise SettingsError(f"There is no command {name}: it is not on the PATH, or not executable.")


def _start_method(line: CommandLine) -> StartMethod:
    given = line.get("start-method")
    if given is None:
        return StartMethod.FORK_SERVER
    method = StartMethod.named(given.text)
    if method is None:
        raise given.refused("this is fork-server or exec (or torchrun's forkserver, fork or spawn)")
    return method


def _logs(line: CommandLine, workers: int) -> LogSettings:
    """Where the workers' output goes."""
    folder, redirects, tee = line.get("log-dir"), line.get("redirects"), line.get("tee")
    to_files = {} if redirects is None else _streams(redirects, workers)
    to_both = {} if tee is None else _streams(tee, workers)
    if folder is None:
        if redirects is not None and to_files:
            raise redirects.refused("there is no folder for the files; name one with --log-dir")
        # Without files, tee asks for what happens anyway: each line on the console, with its rank.
        return LogSettings()
    # What is there of the path so far must be a folder that new ones can be made in.
    directory = Path(folder.text).absolute()
    there = next(path for path in (directory, *directory.parents) if _exists(path))
    if not there.is_dir():
        raise folder.refused(f"{there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise folder.refused(f"{there} is not writable")
    return LogSettings(directory=directory, redirects=to_files, tee=to_both)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # such as a name that is too long
        return False


def _streams(given: Given, workers: int) -> dict[int, Streams]:
    """``3`` for all local ranks, or ``0:1,1:3``; ranks without a stream are left out."""
    if re.fullmatch(r"[0-3]", given.text.strip()):
        chosen = dict.fromkeys(range(workers), Streams(int(given.text)))
    elif re.fullmatch(r"\s*[0-9]{1,6}:[0-3](,[0-9]{1,6}:[0-3])*\s*", given.text):
        pairs = (pair.split(":") for pair in given.text.split(","))
        chosen = {int(rank): Streams(int(streams)) for rank, streams in pairs}
    else:
        raise given.refused("this is 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or by local rank as in 0:1,1:3")
    if (highest := max(chosen)) >= workers:
        raise given.refused(f"there is no local rank {highest}: this node has {workers} worker{'s' * (workers > 1)}")
    return {rank: streams for rank, streams in chosen.items() if streams}
