"""Parse a command line and an environment into :class:`~torchelastic.config.settings.AgentSettings`.

This module raises all errors that can be detected before the agent starts; each message names the flag or variable.
Differences from ``torchrun``:

* A run of one node needs neither an etcd nor an id. A run of several nodes with an etcd needs an id, because unrelated
  runs with torchrun's default id would join each other.
* ``--master-addr`` and ``--master-port`` are ignored with a warning if they do not name the endpoint: many scripts pass
  them and work without them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
import shutil
import socket
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchelastic.config import flags, machine
from torchelastic.config.parsers import RawValue, integer
from torchelastic.config.settings import (
    AgentSettings,
    LogSettings,
    NodeSettings,
    Program,
    ProgramKind,
    RendezvousSettings,
    StartMethod,
    Streams,
)
from torchelastic.errors import SettingsError
from torchelastic.protocol.pod import Env
from torchelastic.protocol.records import PROTOCOL_VERSION, SizeRecord, bracketed
from torchelastic.store.api import DEFAULT_PORT, StoreSettings, parse_endpoints, split_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.elastic.multiprocessing import LogsSpecs

    from torchelastic.config.flags import CommandLine

logger: Final = logging.getLogger(__name__)

_MAX_WORKERS: Final = 10_000
_ONE_WORKER: Final = RawValue("--nproc-per-node", "1")

BACKENDS: Final[Mapping[str, int | None]] = {"torchelastic": None, "etcd": None, "etcd-v3": 3, "etcd-v2": 2}
"""The names of torchelastic's rendezvous, with the version of etcd's API that each selects; None to detect it."""

_TORCH_BACKENDS: Final[Mapping[str, int]] = {"c10d": 29400, "static": 29500}
"""torch's names of a rendezvous that one of the nodes serves, with the default ports."""

_TORCH_RUN_ID: Final = "none"
"""torch's default id of a run; each run with one of torch's backends has its own etcd."""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> AgentSettings:
    """Return the settings of the agent.

    Args:
        argv: the command line without the name of the command.
        environ: contains torchrun's PET_* variables and the operator's (:class:`~torchelastic.protocol.pod.Env`).

    Raises:
        SettingsError: a setting is invalid; the message states what to change.
        SystemExit: after ``--help`` or ``--version``.
    """
    operator_version = environ.get(Env.PROTOCOL)  # checked first, because another version may have other flags
    if operator_version and operator_version.strip() != str(PROTOCOL_VERSION):
        raise SettingsError(
            f"The operator uses version {operator_version} of the protocol between operator and agents, but this agent "
            f"uses version {PROTOCOL_VERSION}: use an image with the operator's release, or update the operator."
        )
    line = flags.read(argv, environ)
    node = read_node(line)
    workers = count_workers(line.raw.get("nproc-per-node", _ONE_WORKER), environ)
    if line.values.get("virtual-local-rank"):
        machine.own_device(environ, workers - 1)  # each worker needs one
    settings = AgentSettings(
        **{"job": ("", node["rendezvous"].run_id), **line.settings(AgentSettings), **node},
        program=_program(line, environ),
        workers=workers,
        logs=_logs(line, workers),
    )
    _warn_about_ignored_flags(line, node["rendezvous"].size)
    return settings


def _warn_about_ignored_flags(line: CommandLine, size: SizeRecord) -> None:
    """Warn about flags without effect, after all other checks."""
    names = () if size.max > 1 and backend_of(line).text == "static" else ("master-addr", "master-port")
    if ignored := [line.raw[name].source for name in names if name in line.raw]:
        logger.warning("%s ignored: the nodes agree on an address by themselves.", " and ".join(ignored))
    requested: SizeRecord = line.values.get("nnodes", size)
    if (requested.min, requested.max) != (size.min, size.max):
        logger.warning(
            "%s ignored: the operator sets the number of nodes, %d to %d (minReplicas, maxReplicas).",
            line.raw["nnodes"].source,
            size.min,
            size.max,
        )


def read_node(line: CommandLine) -> dict[str, Any]:
    """Return the settings of the node by field of :class:`NodeSettings`.

    Raises:
        SettingsError: a value is invalid, or a run of several nodes has no store or no id.
    """
    size = line.values.get("size") or line.values.get("nnodes") or SizeRecord(min=1, max=1, desired=1)
    standalone = line.values.get("standalone", False)
    backend = backend_of(line)
    of_torch = backend.text in _TORCH_BACKENDS
    # The nodes of a run of one node need not find each other.
    store = None if standalone or (of_torch and size.max == 1) else _read_store(line, backend)
    if store is None and size.max > 1:
        remedy = ", and remove --standalone, which limits the run to one node" if standalone else ""
        raise SettingsError(
            f"A run of up to {size.max} nodes needs the address of one of them: set --rdzv-backend c10d and "
            f"--rdzv-endpoint HOST, or set --rdzv-endpoint to an etcd{remedy}."
        )
    rules = line.settings(RendezvousSettings) | {"size": size}
    if of_torch and store is not None:
        rules.setdefault("run_id", _TORCH_RUN_ID)
    if "run_id" not in rules and size.max > 1:
        raise SettingsError(
            "--rdzv-id is missing: nodes with the same id train together, so a run of several nodes needs an id that "
            "no other run on this etcd has, for example --rdzv-id digits-7."
        )
    own = line.settings(NodeSettings)
    served = machine.local_addresses(split_endpoint(store.endpoints[0])[0]) if of_torch and store is not None else ()
    address = own.get("address") or (
        served[0] if served else "127.0.0.1" if store is None else machine.own_address(store.endpoints)
    )
    # Only an address that the user chose selects an interface.
    chosen = "address" in own and line.raw["local-addr"].source != Env.NODE_ADDRESS
    return {
        "node_name": socket.gethostname(),
        "topology_key": machine.host_id(),
        **own,
        "rendezvous": RendezvousSettings(**{"run_id": os.urandom(16).hex(), **rules}),
        "store": store,
        "etcd_addresses": served,
        "address": address,
        "interface": machine.interface_of(address) if chosen else "",
    }


def backend_of(line: CommandLine) -> RawValue:
    """Return the name of the rendezvous; the flags of torch's static rendezvous select it, as under torchrun."""
    if (raw := line.raw.get("rdzv-backend")) is not None:
        return dataclasses.replace(raw, text=raw.text.strip().lower().replace("_", "-"))
    static = "rdzv-endpoint" not in line.raw and not {"node-rank", "master-addr", "master-port"}.isdisjoint(line.raw)
    return RawValue("--rdzv-backend", "static" if static else "torchelastic")


def endpoint_of(line: CommandLine, backend: str) -> RawValue | None:
    """Return the endpoint of the rendezvous, with torch's defaults for its backends; None if it is not known."""
    if (endpoint := line.raw.get("rdzv-endpoint")) is not None or backend in BACKENDS:
        return endpoint
    if backend == "c10d":
        return RawValue("--rdzv-endpoint", "localhost", between=" ")
    host = line.raw.get("master-addr", RawValue("--master-addr", "127.0.0.1", between=" "))
    port = line.raw.get("master-port")
    return dataclasses.replace(host, text=f"{bracketed(host.text)}{f':{integer(1, 65535)(port)}' if port else ''}")


def _read_store(line: CommandLine, backend: RawValue) -> StoreSettings | None:
    """Return the settings of the store; None if its address is not set."""
    if (name := backend.text) not in {*BACKENDS, *_TORCH_BACKENDS}:
        raise backend.error("unknown rendezvous; use c10d, or remove this flag to use etcd")
    if (endpoint := endpoint_of(line, name)) is None:
        return None
    try:
        written, endpoints = parse_endpoints(endpoint.text, _TORCH_BACKENDS.get(name, DEFAULT_PORT))
    except SettingsError as error:
        # The message shows the invalid part only, because the value may contain a password.
        raise endpoint.error(str(error), secret=True) from None
    values = line.values
    files = values.get("tls", values.get("certificates", {})) | {
        key: values[key] for key in ("cacert", "cert", "key") if key in values
    }
    protocol = values.get("protocol") or written or ("https" if files else "http")
    if protocol != (written or protocol):
        raise line.raw["protocol"].error(f"{endpoint.source} specifies {written}://; set only one of the two")
    if files and protocol == "http":
        raise SettingsError(f"{', '.join(files)} in --rdzv-conf: certificates need protocol=https.")
    for one, other in (("key", "cert"), ("username", "password"), ("password", "username")):
        if one in values and other not in {*values, *files}:
            raise line.raw[one].error(f"{one} requires {other}", secret=True)
    if name in _TORCH_BACKENDS and (len(endpoints) > 1 or protocol != "http"):
        raise endpoint.error(f"with {name}, the endpoint is HOST:PORT of one node, without TLS")
    if "secret_file" in values and name not in _TORCH_BACKENDS:
        raise line.raw["secret_file"].error("only an etcd that a node serves has a secret: set --rdzv-backend c10d")
    username, password = values.get("username"), values.get("password")
    if name in _TORCH_BACKENDS and (secret := values.get("secret_file") or values.get("secret")):
        run_id = line.settings(RendezvousSettings).get("run_id", _TORCH_RUN_ID)
        username, password = "root", _password(secret, run_id)
    return StoreSettings(
        endpoints=endpoints,
        protocol=protocol,
        ca_cert=files.get("cacert"),
        cert=files.get("cert"),
        key=files.get("key"),
        username=username,
        password=password,
        version=BACKENDS.get(name, 3),
    )


def _password(secret: str, run_id: str) -> str:
    """Return the password of etcd's user root for a run whose nodes share a secret."""
    salt = f"torchelastic {run_id}".encode(errors="surrogatepass")
    return hashlib.scrypt(secret.encode(errors="surrogatepass"), salt=salt, n=1 << 14, r=8, p=1, dklen=32).hex()


def count_workers(raw: RawValue, environ: Mapping[str, str]) -> int:
    """Return the number of workers of this node, from ``--nproc-per-node``."""
    counts: dict[str, Callable[[], int]] = {
        "cpu": machine.cpu_count,
        "gpu": lambda: machine.gpu_count(environ),
        "xpu": machine.xpu_count,
        "auto": lambda: machine.gpu_count(environ) or machine.cpu_count(),
    }
    if (text := raw.text.strip().lower()) not in counts:
        return integer(1, _MAX_WORKERS, also=", or auto, cpu, gpu or xpu")(raw)
    if not (count := counts[text]()):
        raise raw.error(f"no {text.upper()} is visible on this node; use cpu, auto or a number")
    return count


def _program(line: CommandLine, environ: Mapping[str, str]) -> Program:
    """Return the program of the workers."""
    argv = line.program
    if not argv or not argv[0]:
        raise SettingsError(f"The program is missing: {flags.PROGRAM_NAME} [FLAG …] PROGRAM [ARGUMENT …].")
    method = line.values.get("start-method", StartMethod.FORK_SERVER)
    is_command, is_module = line.values.get("no-python", False), line.values.get("module", False)
    if is_command and is_module:
        raise SettingsError("--no-python and --module cannot be combined: a module is always Python.")
    if not is_command and (interpreter := environ.get("PYTHON_EXEC")):
        argv = (interpreter, "-u", *(["-m"] * is_module), *argv)
        program = Program(ProgramKind.COMMAND, argv)
    elif is_command:
        program = dataclasses.replace(program_of_command(argv), start_method=method)
    else:
        program = Program(ProgramKind.MODULE if is_module else ProgramKind.SCRIPT, argv, method)
    _check_exists(program, is_command=is_command)
    preload = line.values.get("preload", ())
    if preload == ("none",):
        return dataclasses.replace(program, learns=False)
    return dataclasses.replace(program, preload=preload)


def program_of_command(argv: Sequence[str], start_method: StartMethod = StartMethod.FORK_SERVER) -> Program:
    """Return the program that a command line starts.

    ``python x.py …`` and ``python -m x …`` are Python programs. Anything else is a command, including this
    interpreter with flags, and another interpreter.
    """
    command, *rest = argv
    names = ("python", "python3", f"python3.{sys.version_info.minor}")
    if rest and (command in names or ("/" in command and Path(command) == Path(sys.executable))):
        if rest[0] == "-m" and len(rest) > 1:
            return Program(ProgramKind.MODULE, tuple(rest[1:]), start_method)
        if not rest[0].startswith("-"):
            return Program(ProgramKind.SCRIPT, tuple(rest), start_method)
    return Program(ProgramKind.COMMAND, tuple(argv), start_method)


def _check_exists(program: Program, *, is_command: bool) -> None:
    """Raise SettingsError if the program does not exist."""
    name, folder = program.argv[0], Path.cwd()
    match program.kind:
        case ProgramKind.COMMAND:
            if not shutil.which(name):
                raise SettingsError(f"Command {name} was not found: it is not on the PATH, or not executable.")
        case ProgramKind.MODULE:
            package = name.partition(".")[0]
            # The working directory comes first, as with `python -m`.
            if package not in sys.builtin_module_names and not PathFinder.find_spec(package, [str(folder), *sys.path]):
                raise SettingsError(f"Module {name} was not found in {folder} or by {sys.executable}.")
        # pathlib would raise if the path is too long or a folder is not accessible.
        case ProgramKind.SCRIPT if os.path.isdir(name):  # noqa: PTH112
            if not os.path.isfile(os.path.join(name, "__main__.py")):  # noqa: PTH113, PTH118
                raise SettingsError(f"{name} is a folder without a __main__.py: pass the path of a Python file in it.")
        case ProgramKind.SCRIPT if not os.path.exists(name):  # noqa: PTH110
            if not is_command and shutil.which(name):
                raise SettingsError(f"There is no script {name}; to run the command {name}, put --no-python before it.")
            raise SettingsError(f"Script {name} was not found in {folder}.")
        case ProgramKind.SCRIPT if not os.access(name, os.R_OK):
            raise SettingsError(f"The current user cannot read the script {name}: permission denied.")


def _logs(line: CommandLine, workers: int) -> LogSettings:
    logs = LogSettings(**{**line.settings(LogSettings), **read_streams(line.raw, workers)})
    if (raw := line.raw.get("logs-specs")) is None:
        return logs
    import importlib.metadata

    if not (found := importlib.metadata.entry_points(group="torchrun.logs_specs", name=raw.text)):
        raise raw.error("no installed package has this entry point in the group torchrun.logs_specs")
    try:
        specs = make_specs(found[raw.text].load(), logs)
    except Exception as error:  # noqa: BLE001 - the user's module and class
        raise raw.error(f"it cannot be loaded: {type(error).__name__}: {error}") from None
    return dataclasses.replace(logs, directory=None, redirects={}, tee={}, specs=specs)


def make_specs(kind: Callable[..., LogsSpecs], logs: LogSettings) -> LogsSpecs:
    """Return an object of torch's class, or of a subclass, with these settings; this imports torch."""
    from torch.distributed.elastic.multiprocessing import Std

    return kind(
        log_dir=None if logs.directory is None else str(logs.directory),
        redirects={rank: Std(int(streams)) for rank, streams in logs.redirects.items()} or Std.NONE,
        tee={rank: Std(int(streams)) for rank, streams in logs.tee.items()} or Std.NONE,
        local_ranks_filter=None if logs.local_ranks_filter is None else set(logs.local_ranks_filter),
    )


def read_streams(raw: Mapping[str, RawValue], workers: int) -> dict[str, Any]:
    """Return the folder and the streams of the workers' output by field of :class:`LogSettings`.

    Args:
        raw: the unparsed values of ``log-dir``, ``redirects`` and ``tee``, each of them optional.
        workers: the number of workers.
    """
    streams: dict[str, Any] = {name: _streams(raw.get(name), workers) for name in ("redirects", "tee")}
    if (folder := raw.get("log-dir")) is None:
        return streams
    # The existing part of the path must be a writable folder.
    directory = Path(folder.text).absolute()
    existing = next(path for path in (directory, *directory.parents) if os.path.exists(path))  # noqa: PTH110 - as above
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise folder.error(f"{existing} is not a writable folder")
    return streams | {"directory": directory}


def _streams(raw: RawValue | None, workers: int) -> dict[int, Streams]:
    """Parse ``3`` for all local ranks, or ``0:1,1:3``; ranks without a stream are omitted."""
    if raw is None:
        return {}
    if not re.fullmatch(r"\s*([0-3]|[0-9]{1,6}:[0-3](,[0-9]{1,6}:[0-3])*)\s*", raw.text):
        raise raw.error("must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or by local rank as in 0:1,1:3")
    pairs = [pair.split(":") for pair in raw.text.split(",")]
    chosen = {int(rank): int(streams) for *ranks, streams in pairs for rank in ranks or range(workers)}
    if (highest := max(chosen)) >= workers:
        count = f"{workers} workers" if workers > 1 else "1 worker"
        raise raw.error(f"there is no local rank {highest}: this node has {count}")
    return {rank: Streams(streams) for rank, streams in chosen.items() if streams}
