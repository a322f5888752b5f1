"""Parses a command line and an environment to :class:`~torchelastic.config.settings.AgentSettings`.

All errors that can be detected before the start are reported here, in a sentence that names the flag or variable.
Differences from ``torchrun``:

* A run of one node needs neither an etcd nor an id. A run of several nodes needs both, because unrelated runs would
  meet under torchrun's default id.
* ``--node-rank``, ``--master-addr`` and ``--master-port`` are ignored with a warning: many scripts pass them and work
  without them.
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
from typing import TYPE_CHECKING, Final

from torchelastic import machine
from torchelastic.config import flags
from torchelastic.config.parsing import integer
from torchelastic.config.rendezvous import read_conf, read_rendezvous, read_size, read_store
from torchelastic.config.settings import AgentSettings, LogSettings, Program, ProgramKind, StartMethod, Streams
from torchelastic.errors import SettingsError
from torchelastic.protocol import PROTOCOL_VERSION, Env

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchelastic.config.flags import CommandLine
    from torchelastic.config.parsing import Given
    from torchelastic.protocol import SizeRecord
    from torchelastic.store.api import StoreSettings

_log: Final = logging.getLogger(__name__)

_MAX_WORKERS: Final = 10_000
_STATIC: Final = ("node-rank", "master-addr", "master-port")


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> AgentSettings:
    """Return the settings of the agent.

    Args:
        argv: the command line without the name of the command.
        environ: has torchrun's PET_* variables and the operator's variables (:class:`~torchelastic.protocol.Env`).

    Raises:
        SettingsError: a setting is invalid; the message says what to change.
        SystemExit: after ``--help`` or ``--version``.
    """
    spoken = environ.get(Env.PROTOCOL)  # checked first, because another version may have other flags
    if spoken and spoken.strip() != str(PROTOCOL_VERSION):
        raise SettingsError(
            f"The operator speaks version {spoken} of the protocol between operator and agents, this agent version "
            f"{PROTOCOL_VERSION}: use an image with an agent of the operator's release, or upgrade the operator."
        )
    line = flags.read(argv, environ)
    size = read_size(line)
    store = _store(line, size)
    _check_exit_codes(line)
    workers = _workers(line, environ)
    values = line.settings(AgentSettings)
    if "address" not in values:
        values["address"] = "127.0.0.1" if store is None else machine.own_address(store.endpoints)
    local = line.given.get("local-addr")
    settings = AgentSettings(
        **{"node_name": socket.gethostname(), "place": machine.host_id(), **values},
        rendezvous=read_rendezvous(line, size, read_conf(line)),
        store=store,
        program=_program(line),
        workers=workers,
        logs=_logs(line, workers),
        # Only an address that the user chose selects an interface.
        interface="" if local is None or local.source == Env.NODE_ADDRESS else machine.interface_of(values["address"]),
    )
    _warn_of_ignored(line, size)
    return settings


def _store(line: CommandLine, size: SizeRecord) -> StoreSettings | None:
    """Return the settings of the store; None for a run of one node without a store."""
    if line.values.get("standalone"):
        if size.max > 1:
            raise SettingsError(
                f"--standalone is a run of one node, but up to {size.max} are asked for: leave out one of the two, or "
                "name an etcd with --rdzv-endpoint in place of --standalone."
            )
        return None
    store = read_store(line, read_conf(line))
    if store is None and size.max > 1:
        static = [line.given[name].source for name in _STATIC if name in line.given]
        habit = f" ({' and '.join(static)} can't do that here: the nodes meet in an etcd)" if static else ""
        raise SettingsError(
            f"A run of up to {size.max} nodes needs an etcd where they meet: name it with --rdzv-endpoint "
            f"HOST:2379{habit}."
        )
    return store


def _warn_of_ignored(line: CommandLine, size: SizeRecord) -> None:
    """Warn about flags without effect, after all other checks."""
    ignored = [line.given[name].source for name in _STATIC if name in line.given]
    if ignored:
        _log.warning("%s ignored: the nodes agree on ranks and addresses by themselves.", " and ".join(ignored))
    if line.values.get("standalone") and (endpoint := line.given.get("rdzv-endpoint")) is not None:
        _log.warning("%s ignored: --standalone needs no etcd.", endpoint.source)
    asked: SizeRecord | None = line.values.get("nnodes")
    if asked is not None and (asked.min, asked.max) != (size.min, size.max):
        nodes = line.given["nnodes"]
        _log.warning(
            "%s=%s ignored: the operator says how many nodes there are, %d to %d (minReplicas, maxReplicas).",
            nodes.source,
            nodes.text,
            size.min,
            size.max,
        )


def _check_exit_codes(line: CommandLine) -> None:
    final, free = line.values.get("final-exit-codes", frozenset()), line.values.get("free-exit-codes", frozenset())
    if both := final & free:
        source = line.given["final-exit-codes"].source
        raise line.given["free-exit-codes"].refused(f"{min(both)} is in {source}, too; leave it out of one of the two")


def _workers(line: CommandLine, environ: Mapping[str, str]) -> int:
    """Return the number of workers of this node."""
    if (given := line.given.get("nproc-per-node")) is None:
        return 1
    match given.text.strip().lower():
        case "cpu":
            return machine.cpu_count()
        case "gpu":
            if (gpus := machine.gpu_count(environ)) == 0:
                raise given.refused("no GPU is visible here; ask for cpu, auto or a number")
            return gpus
        case "auto":
            return machine.gpu_count(environ) or machine.cpu_count()
        case text if text.lstrip("-").isdecimal():
            return integer(1, _MAX_WORKERS)(given)
        case _:
            raise given.refused("this is a number of workers, or auto, cpu or gpu")


def _program(line: CommandLine) -> Program:
    """Return the program of the workers."""
    argv = line.program
    if not argv or not argv[0]:
        raise SettingsError(f"The program is missing: {flags.PROGRAM_NAME} [FLAG …] PROGRAM [ARGUMENT …].")
    method = line.values.get("start-method", StartMethod.FORK_SERVER)
    is_command, is_module = line.values.get("no-python", False), line.values.get("module", False)
    if is_command and is_module:
        raise SettingsError("--no-python and --module can't be given together: a module is always Python.")
    if is_command:
        # Imported here, because only this form needs it.
        from torchelastic.config.program import program_of_command

        program = dataclasses.replace(program_of_command(argv), start_method=method)
    else:
        program = Program(ProgramKind.MODULE if is_module else ProgramKind.SCRIPT, argv, method)
    _check_exists(program, is_command=is_command)
    if (given := line.given.get("preload")) is None:
        return program
    names: tuple[str, ...] = line.values["preload"]
    _check_preload(given, names, program)
    return dataclasses.replace(program, preload=names)


def _check_preload(given: Given, names: Sequence[str], program: Program) -> None:
    from torchelastic.config.program import search_path  # as above

    is_python = program.kind is not ProgramKind.COMMAND
    first = (search_path(program.kind.value, program.argv[0]) if is_python else "") or str(Path.cwd())
    for name in names:
        if not _has_module(name, first):
            raise given.refused(f"there is no module {name} (looked up from {first} and by {sys.executable})")


def _has_module(name: str, first: str) -> bool:
    """Return whether a module's package is in this folder or on the interpreter's path, without importing it."""
    package = name.partition(".")[0]
    return package in sys.builtin_module_names or PathFinder.find_spec(package, [first, *sys.path]) is not None


def _check_exists(program: Program, *, is_command: bool) -> None:
    """Raise SettingsError if the program does not exist."""
    name = program.argv[0]
    if program.kind is ProgramKind.MODULE:
        if not _has_module(name, str(Path.cwd())):  # the first folder of `python -m`
            raise SettingsError(f"There is no module {name} (looked up from {Path.cwd()} and by {sys.executable}).")
    elif program.kind is ProgramKind.SCRIPT:
        # pathlib would raise if the path is too long or a folder is not accessible.
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


def _logs(line: CommandLine, workers: int) -> LogSettings:
    """Return the destinations of the workers' output."""
    redirects, tee = (_streams(line.given.get(name), workers) for name in ("redirects", "tee"))
    if (folder := line.given.get("log-dir")) is None:
        if redirects:
            raise line.given["redirects"].refused("there is no folder for the files; name one with --log-dir")
        # Without files, tee has no effect: the console shows each line with its rank anyway.
        return LogSettings()
    # The existing part of the path must be a writable folder.
    directory = Path(folder.text).absolute()
    there = next(path for path in (directory, *directory.parents) if os.path.exists(path))  # noqa: PTH110 - as above
    if not there.is_dir():
        raise folder.refused(f"{there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise folder.refused(f"{there} is not writable")
    return LogSettings(directory=directory, redirects=redirects, tee=tee)


def _streams(given: Given | None, workers: int) -> dict[int, Streams]:
    """Parse ``3`` for all local ranks, or ``0:1,1:3``; ranks without a stream are left out."""
    if given is None:
        return {}
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
