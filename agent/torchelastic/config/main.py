"""Parses a command line and an environment into :class:`~torchelastic.config.settings.AgentSettings`.

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
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchelastic import machine
from torchelastic.config import flags
from torchelastic.config.parsing import integer
from torchelastic.config.rendezvous import read_node
from torchelastic.config.settings import AgentSettings, LogSettings, Program, ProgramKind, StartMethod, Streams
from torchelastic.errors import SettingsError
from torchelastic.protocol import PROTOCOL_VERSION, Env

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchelastic.config.flags import CommandLine
    from torchelastic.config.parsing import Given
    from torchelastic.protocol import SizeRecord

_log: Final = logging.getLogger(__name__)

_MAX_WORKERS: Final = 10_000


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
    node = read_node(line)
    workers = _workers(line, environ)
    settings = AgentSettings(
        **{"job": ("", node["rendezvous"].run_id), **line.settings(AgentSettings), **node},
        program=_program(line),
        workers=workers,
        logs=read_logs(line.given, workers),
    )
    _warn_of_ignored(line, node["rendezvous"].size)
    return settings


def _warn_of_ignored(line: CommandLine, size: SizeRecord) -> None:
    """Warn about flags without effect, after all other checks."""
    if ignored := [
        line.given[name].source for name in ("node-rank", "master-addr", "master-port") if name in line.given
    ]:
        _log.warning("%s ignored: the nodes agree on ranks and addresses by themselves.", " and ".join(ignored))
    asked: SizeRecord = line.values.get("nnodes", size)
    if (asked.min, asked.max) != (size.min, size.max):
        _log.warning(
            "%s ignored: the operator says how many nodes there are, %d to %d (minReplicas, maxReplicas).",
            line.given["nnodes"].source,
            size.min,
            size.max,
        )


def _workers(line: CommandLine, environ: Mapping[str, str]) -> int:
    """Return the number of workers of this node."""
    if (given := line.given.get("nproc-per-node")) is None:
        return 1
    cpus, gpus = machine.cpu_count(), machine.gpu_count(environ)
    counts = {"cpu": cpus, "gpu": gpus, "auto": gpus or cpus}
    if (text := given.text.strip().lower()) not in counts:
        return integer(1, _MAX_WORKERS, also=", or auto, cpu or gpu")(given)
    if not counts[text]:
        raise given.refused("no GPU is visible here; ask for cpu, auto or a number")
    return counts[text]


def _program(line: CommandLine) -> Program:
    """Return the program of the workers."""
    argv = line.program
    if not argv or not argv[0]:
        raise SettingsError(f"The program is missing: {flags.PROGRAM_NAME} [FLAG …] PROGRAM [ARGUMENT …].")
    method = line.values.get("start-method", StartMethod.FORK_SERVER)
    is_command, is_module = line.values.get("no-python", False), line.values.get("module", False)
    if is_command and is_module:
        raise SettingsError("--no-python and --module cannot be combined: a module is always Python.")
    if is_command:
        # Imported here, because only this form needs it.
        from torchelastic.config.program import program_of_command

        program = dataclasses.replace(program_of_command(argv), start_method=method)
    else:
        program = Program(ProgramKind.MODULE if is_module else ProgramKind.SCRIPT, argv, method)
    _check_exists(program, is_command=is_command)
    return dataclasses.replace(program, preload=line.values.get("preload", ()))


def _check_exists(program: Program, *, is_command: bool) -> None:
    """Raise SettingsError if the program does not exist."""
    name, here = program.argv[0], Path.cwd()
    match program.kind:
        case ProgramKind.COMMAND:
            if not shutil.which(name):
                raise SettingsError(f"There is no command {name}: it is not on the PATH, or not executable.")
        case ProgramKind.MODULE:
            package = name.partition(".")[0]
            # The first folder is that of `python -m`.
            if package not in sys.builtin_module_names and not PathFinder.find_spec(package, [str(here), *sys.path]):
                raise SettingsError(f"There is no module {name} (looked up from {here} and by {sys.executable}).")
        # pathlib would raise if the path is too long or a folder is not accessible.
        case ProgramKind.SCRIPT if os.path.isdir(name):  # noqa: PTH112
            if not os.path.isfile(os.path.join(name, "__main__.py")):  # noqa: PTH113, PTH118
                raise SettingsError(f"{name} is a folder without a __main__.py: name the Python file in it.")
        case ProgramKind.SCRIPT if not os.path.isfile(name):  # noqa: PTH113
            if not is_command and shutil.which(name):
                raise SettingsError(f"There is no script {name}; to run the command {name}, put --no-python before it.")
            raise SettingsError(f"There is no script {name} (looked up from {here}).")
        case ProgramKind.SCRIPT if not os.access(name, os.R_OK):
            raise SettingsError(f"The script {name} cannot be read by the user that runs this.")


def read_logs(given: Mapping[str, Given], workers: int) -> LogSettings:
    """Return the destinations of the workers' output.

    Args:
        given: the values of ``log-dir``, ``redirects`` and ``tee``, each of them optional.
        workers: the number of workers.

    Raises:
        SettingsError: a value is invalid.
    """
    redirects, tee = (_streams(given.get(name), workers) for name in ("redirects", "tee"))
    if (folder := given.get("log-dir")) is None:
        if redirects:
            raise given["redirects"].refused("there is no folder for the files; name one with --log-dir")
        return LogSettings(tee=tee)
    # The existing part of the path must be a writable folder.
    directory = Path(folder.text).absolute()
    there = next(path for path in (directory, *directory.parents) if os.path.exists(path))  # noqa: PTH110 - as above
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise folder.refused(f"{there} is not a writable folder")
    return LogSettings(directory, redirects, tee)


def _streams(given: Given | None, workers: int) -> dict[int, Streams]:
    """Parse ``3`` for all local ranks, or ``0:1,1:3``; ranks without a stream are left out."""
    if given is None:
        return {}
    if not re.fullmatch(r"\s*([0-3]|[0-9]{1,6}:[0-3](,[0-9]{1,6}:[0-3])*)\s*", given.text):
        raise given.refused("must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or by local rank as in 0:1,1:3")
    pairs = [pair.split(":") for pair in given.text.split(",")]
    chosen = {int(rank): int(streams) for *ranks, streams in pairs for rank in ranks or range(workers)}
    if (highest := max(chosen)) >= workers:
        raise given.refused(f"there is no local rank {highest}: this node has {workers} worker{'s' * (workers > 1)}")
    return {rank: Streams(streams) for rank, streams in chosen.items() if streams}
