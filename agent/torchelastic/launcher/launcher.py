"""Call a Python function on many workers: ``launch(func, …).rank(0)`` returns what rank 0 returned.

The arguments and results have the meaning that torchrunx gives them, so that programs written for it run unchanged.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import io
import math
import operator
import os
import re
import tarfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from torchelastic.agent.function_call import Setup, serialize_call
from torchelastic.errors import SettingsError
from torchelastic.launcher.head import Head, Result, command_for
from torchelastic.launcher.hosts import Host, resolve
from torchelastic.launcher.log_handlers import Lines, check_handlers, default_handlers

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterable

    from torchelastic.launcher.head import Cluster

DEFAULT_ENV_VARS_FOR_COPY: Final = (
    *("PATH", "LD_LIBRARY", "LIBRARY_PATH", "PYTHON*", "CUDA*", "TORCH*", "PYTORCH*", "NCCL*"),
)
"""Patterns of the environment variables that workers on other hosts get from the caller."""

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")

BACKENDS: Final = (None, "nccl", "gloo", "mpi", "ucc", "auto")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _are_patterns(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, str) for each in value)


def _are_variables(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and name and not {"=", "\0"} & {*name} and "\0" not in f"{text}"
        for name, text in value.items()
    )


def _is_amount(value: object) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _are_bounds(value: Any) -> bool:  # noqa: ANN401 - any value
    bounds = value if isinstance(value, Sequence) else (value, value)
    return value is None or (len(bounds) == 2 and all(map(_is_count, bounds)) and 1 <= bounds[0] <= bounds[1])


_RULES: Final[Sequence[tuple[str, Callable[[Any], bool], str]]] = (
    ("backend", lambda value: value in BACKENDS, '"auto", nccl, gloo, mpi, ucc or None'),
    ("timeout agent_timeout", _is_time, "a number of seconds above 0"),
    ("worker_timeout heartbeat_timeout", lambda value: value is None or _is_time(value), "a number of seconds above 0"),
    ("max_restarts", _is_count, "a number of at least 0"),
    (
        "workers",
        _are_bounds,
        "(min, max) with 1 <= min <= max, a number, or None",
    ),
    (
        "ssh_config_file env_file code manifest",
        lambda value: value is None or isinstance(value, (str, os.PathLike)),
        "a path",
    ),
    (
        "python image",
        lambda value: value is None or (isinstance(value, str) and value != ""),
        "a text that is not empty, or None",
    ),
    (
        "namespace job",
        lambda value: value is None or (isinstance(value, str) and _NAME.fullmatch(value) is not None),
        "a name of lower-case letters, digits, - and ., or None",
    ),
    (
        "resources",
        lambda value: value is None or (_are_variables(value) and all(map(_is_amount, value.values()))),
        'a dictionary such as {"nvidia.com/gpu": "1"}, or None',
    ),
    ("keep keep_warm", lambda value: isinstance(value, bool), "True or False"),
    ("default_env_vars", _are_patterns, "a list of names or patterns of variables"),
    (
        "copy_env_vars",
        lambda value: value is None or _are_patterns(value),
        "a list of names or patterns of variables",
    ),
    (
        "extra_env_vars",
        lambda value: value is None or _are_patterns(value) or _are_variables(value),
        "a list of names or patterns of variables, or a dictionary of variables",
    ),
)
"""The names of settings, and what their values must be."""


@dataclass(frozen=True)
class LaunchResult:
    """The return values of the workers.

    Attributes:
        results: the values of each host's workers, by local rank.
    """

    results: Mapping[str, Sequence[Any]]
    _values: Sequence[Any]

    def rank(self, i: int) -> Any:  # noqa: ANN401 - the function's value
        """Return the value of a worker by its global rank; raise IndexError if there is none."""
        if not 0 <= i < len(self._values):
            raise IndexError(f"There is no rank {i}: the ranks are 0 to {len(self._values) - 1}.")
        return self._values[i]

    def index(self, hostname: str, rank: int | None = None, *, local_rank: int | None = None) -> Any:  # noqa: ANN401
        """Return the value of a worker by its host and local rank, which both keywords name.

        Raises:
            KeyError: no worker ran on this host.
            IndexError: the host had no such worker.
        """
        chosen = rank if local_rank is None else local_rank
        if chosen is None:
            raise TypeError("index() needs the local rank of the worker.")
        if hostname not in self.results:
            raise KeyError(f"No worker ran on {hostname}; the hosts are {', '.join(self.results)}.")
        values = self.results[hostname]
        if not 0 <= chosen < len(values):
            raise IndexError(f"{hostname} has no local rank {chosen}: they are 0 to {len(values) - 1}.")
        return values[chosen]

    def by_hostnames(self) -> dict[str, list[Any]]:
        """Return the values of each host's workers, by local rank."""
        return {host: [*values] for host, values in self.results.items()}

    def by_ranks(self) -> list[Any]:
        """Return the values of all workers, by global rank."""
        return [*self._values]


@dataclass
class Launcher:
    """The settings of a launch; ``tyro.cli(Launcher)`` reads them from the command line.

    Attributes:
        hostnames: the hosts; "auto" for the SLURM allocation if there is one, and otherwise this machine; "kubernetes"
            for the pods of an ElasticJob.
        workers_per_host: the number of workers on each host; "auto" for its number of GPUs, or else of CPUs.
        ssh_config_file: the configuration of ssh, instead of ``~/.ssh/config``.
        backend: the backend of the process group that the workers create; "auto" for nccl with GPUs and gloo without;
            None for no process group.
        timeout: seconds after which a collective fails.
        default_env_vars: patterns of the environment variables that workers on other hosts get.
        extra_env_vars: more such patterns; or variables with their values, which all workers get.
        env_file: a script of bash on each host, whose variables the workers get.
        workers: the minimum and maximum number of workers: the launch goes on without a host that is lost as long as
            the minimum remains. A number for both. None for all workers of all hosts, or of one pod.
        max_restarts: how often failed workers are started again before the launch fails.
        agent_timeout: seconds within which the agents of all hosts must meet.
        heartbeat_timeout: seconds without a heartbeat after which a worker counts as hung; None for no limit.
        python: the Python interpreter of the hosts; None for the path of this one.
        code: a folder with modules that the hosts lack, which are sent to them; None to send the function alone.
        keep_warm: whether an idle process without the function stays on this machine for a minute, for the next launch.
        worker_timeout: another name of timeout.
        copy_env_vars: another name of default_env_vars.
        image: the image of the pods.
        namespace: the namespace of the pods; None for that of the manifest, or else of the kubeconfig or this pod.
        resources: the resources that each pod gets, such as {"nvidia.com/gpu": "1"}.
        manifest: a file with an ElasticJob whose other fields the launch takes, such as volumes of the pods.
        keep: whether the job remains, so that the next launch of this object, or of :func:`attach`, uses its pods.
        job: the name of a kept job to launch in; None for a new job.
    """

    hostnames: list[str] | Literal["auto", "slurm", "kubernetes"] = "auto"
    workers_per_host: int | list[int] | Literal["auto", "slurm", "gpu", "cpu"] = "auto"
    ssh_config_file: str | Path | None = None
    backend: Literal["nccl", "gloo", "mpi", "ucc", "auto"] | None = "auto"
    timeout: int = 600
    default_env_vars: tuple[str, ...] = DEFAULT_ENV_VARS_FOR_COPY
    extra_env_vars: tuple[str, ...] | dict[str, str] | None = ()
    env_file: str | Path | None = None
    workers: tuple[int, int] | int | None = None
    max_restarts: int = 0
    agent_timeout: int = 60
    heartbeat_timeout: float | None = None
    python: str | None = None
    code: str | Path | None = None
    keep_warm: bool = True
    worker_timeout: int | None = None
    copy_env_vars: tuple[str, ...] | None = None
    image: str | None = None
    namespace: str | None = None
    resources: dict[str, str] | None = None
    manifest: str | Path | None = None
    keep: bool = False
    job: str | None = None

    def set_logging_handlers(
        self, handlers: Callable[[], Iterable[logging.Handler]] | Literal["auto"] | None
    ) -> Launcher:
        """Use the handlers that a function returns, the default ones ("auto"), or none; return this launcher."""
        self._handlers = handlers
        return self

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> LaunchResult:  # noqa: ANN401 - the function's
        """Call a function on the workers, and return their values.

        The keywords ``func_args``, ``func_kwargs`` and ``log_handlers`` mean what they mean in :func:`launch`; all
        other arguments are the function's.

        Raises: see :func:`launch`.
        """
        handlers = kwargs.pop("log_handlers", "auto")
        func_args, func_kwargs = kwargs.pop("func_args", None) or (), kwargs.pop("func_kwargs", None) or {}
        if not callable(func):
            raise SettingsError(f"func is {func!r}, which is not a function.")
        if isinstance(func_args, str) or not isinstance(func_args, Sequence):
            raise SettingsError(f"func_args is {func_args!r}: it must be a tuple of arguments.")
        if not isinstance(func_kwargs, Mapping) or not all(isinstance(name, str) for name in func_kwargs):
            raise SettingsError(f"func_kwargs is {func_kwargs!r}: it must be a dictionary of arguments by name.")
        args, kwargs = (*args, *func_args), {**kwargs, **func_kwargs}
        if handlers == "auto":
            chosen = getattr(self, "_handlers", "auto")
            handlers = chosen() if callable(chosen) else chosen
        self._check()
        hosts, cluster = self._hosts()
        names = [host.name for host in hosts]
        setup = Setup(self.backend, float(self.worker_timeout or self.timeout), records=True, exits_at_once=True)
        call = serialize_call(functools.partial(func, **kwargs) if kwargs else func, args, setup)
        chosen = default_handlers(names) if handlers == "auto" else check_handlers(handlers or ())
        head = Head(
            hosts=hosts,
            opened={
                "type": "open",
                "run_id": uuid.uuid4().hex,
                "hosts": names,
                "min_hosts": (min_hosts := 0 if cluster is not None else self._min_hosts(hosts)),
                "max_restarts": self.max_restarts,
                "agent_timeout": float(self.agent_timeout),
                "heartbeat_timeout": self.heartbeat_timeout,
                "directory": f"{Path.cwd()}",
                "environment": self._environment(is_local=cluster is None),
                "env_file": os.fspath(self.env_file) if self.env_file else "",
            },
            code=b"" if self.code is None else _archive(Path(self.code)),
            command=functools.partial(
                command_for,
                python=self.python,
                ssh_config_file=os.fspath(self.ssh_config_file) if self.ssh_config_file else None,
            ),
            lines=Lines([*chosen]),
            keep_warm=self.keep_warm,
            min_hosts=min_hosts,
            cluster=cluster,
        )
        try:
            return _result_of(head.run(call))
        finally:
            if handlers == "auto":
                for handler in chosen:
                    handler.close()

    @property
    def worker_bounds(self) -> tuple[int, int] | None:
        """The minimum and maximum number of workers; None if ``workers`` is None."""
        if self.workers is None or isinstance(self.workers, Sequence):
            return self.workers
        return self.workers, self.workers

    def _hosts(self) -> tuple[list[Host], Cluster | None]:
        """Return the hosts, and the cluster if they are pods."""
        if _word_of(self.hostnames) != "kubernetes":
            return resolve(_word_of(self.hostnames), _word_of(self.workers_per_host), os.environ), None
        try:
            [found] = entry_points(group="torchelastic.launcher", name="kubernetes")
            make = found.load()
        except (ImportError, ValueError):
            raise SettingsError(
                'hostnames="kubernetes" needs the Kubernetes client: pip install "elastic-operator[local]".'
            ) from None
        cluster = make(self)
        return [Host(name, 1) for name in cluster.hosts], cluster

    def _check(self) -> None:
        for names, is_valid, wanted in _RULES:
            for name in names.split():
                if not is_valid(value := getattr(self, name)):
                    raise SettingsError(f"{name} is {value!r}: it must be {wanted}.")
        if self.ssh_config_file is not None and not Path(self.ssh_config_file).is_file():
            raise SettingsError(f"ssh_config_file {os.fspath(self.ssh_config_file)} does not exist.")
        if _word_of(self.hostnames) != "kubernetes":
            for name in ("image", "namespace", "resources", "manifest", "keep", "job"):
                if getattr(self, name):
                    raise SettingsError(f'{name} needs hostnames="kubernetes".')
            return
        if self.ssh_config_file is not None:
            raise SettingsError('ssh_config_file has no effect with hostnames="kubernetes": remove it.')
        workers = _word_of(self.workers_per_host)
        if workers not in ("auto", "gpu") and not (_is_count(workers) and workers):
            raise SettingsError(
                f'workers_per_host is {workers!r}: with hostnames="kubernetes", it must be a number of at least 1, '
                '"gpu" or "auto".'
            )

    def _environment(self, *, is_local: bool) -> dict[str, str]:
        defaults = self.default_env_vars if is_local or self.default_env_vars != DEFAULT_ENV_VARS_FOR_COPY else ()
        patterns = [*(defaults if self.copy_env_vars is None else self.copy_env_vars)]
        given: dict[str, str] = {}
        if isinstance(self.extra_env_vars, Mapping):
            given = {name: f"{value}" for name, value in self.extra_env_vars.items()}
        else:
            patterns += self.extra_env_vars or ()
        copied = {
            name: value for name, value in os.environ.items() if any(fnmatch.fnmatch(name, each) for each in patterns)
        }
        return {**copied, **given}

    def _min_hosts(self, hosts: Sequence[Host]) -> int:
        if (bounds := self.worker_bounds) is None:
            return len(hosts)
        counts = {host.workers for host in hosts}
        smallest, largest = bounds
        if len(counts) > 1 or not isinstance(count := next(iter(counts)), int):
            raise SettingsError("workers needs the same number of workers_per_host on all hosts.")
        if not 1 <= smallest <= largest == count * len(hosts):
            raise SettingsError(
                f"workers is {self.workers!r}: it must be (min, max) with 1 <= min <= max, and max the number of all "
                f"workers, which is {count * len(hosts)}."
            )
        return -(-smallest // count)


def launch(
    func: Callable[..., Any],
    func_args: tuple[Any, ...] | None = None,
    func_kwargs: dict[str, Any] | None = None,
    hostnames: list[str] | Literal["auto", "slurm", "kubernetes"] = "auto",
    workers_per_host: int | list[int] | Literal["auto", "slurm", "gpu", "cpu"] = "auto",
    ssh_config_file: str | Path | None = None,
    backend: Literal["nccl", "gloo", "mpi", "ucc", "auto"] | None = "auto",
    timeout: int = 600,
    default_env_vars: tuple[str, ...] = DEFAULT_ENV_VARS_FOR_COPY,
    extra_env_vars: tuple[str, ...] | dict[str, str] = (),
    env_file: str | Path | None = None,
    log_handlers: Iterable[logging.Handler] | Literal["auto"] | None = "auto",
    **settings: Any,  # noqa: ANN401 - checked by Launcher
) -> LaunchResult:
    """Call a function on many workers, and return their values.

    Args:
        func: the function; it and its arguments are pickled by cloudpickle.
        func_args: its arguments.
        func_kwargs: its keyword arguments.
        hostnames: see :class:`Launcher`.
        workers_per_host: see :class:`Launcher`.
        ssh_config_file: see :class:`Launcher`.
        backend: see :class:`Launcher`.
        timeout: see :class:`Launcher`.
        default_env_vars: see :class:`Launcher`.
        extra_env_vars: see :class:`Launcher`.
        env_file: see :class:`Launcher`.
        log_handlers: the handlers of all lines of the workers and agents; "auto" for files in ``$TORCHRUNX_LOG_DIR`` or
            ``./torchelastic_logs``, and the first worker on standard output; None for no handlers.
        settings: the other attributes of :class:`Launcher`.

    Raises:
        Exception: a worker raised it; its notes name the rank and the host, and contain the traceback.
        WorkerFailedError: a worker has died, or its exception cannot be unpickled.
        AgentFailedError: the agent of a host cannot be started, or has died.
        SettingsError: an argument is invalid; the message states what to change.
        RuntimeError: "slurm" is given without an allocation.
    """
    known = {each.name for each in dataclasses.fields(Launcher)}
    if unknown := sorted(settings.keys() - known):
        raise TypeError(f"launch() has no argument {unknown[0]!r}.")
    launcher = Launcher(
        hostnames,
        workers_per_host,
        ssh_config_file,
        backend,
        timeout,
        default_env_vars,
        extra_env_vars,
        env_file,
        **settings,
    )
    return launcher.run(func, func_args=func_args, func_kwargs=func_kwargs, log_handlers=log_handlers)


def _word_of(value: Any) -> Any:  # noqa: ANN401 - checked by resolve
    """Return a word such as "slurm" that a command line has made a list of one."""
    if isinstance(value, (list, tuple)) and len(value) == 1 and value[0] in {"auto", "slurm", "kubernetes"}:
        return value[0]
    return value


def _archive(folder: Path) -> bytes:
    """Return an archive with the files of a folder, except hidden and compiled ones."""
    if not folder.is_dir():
        raise SettingsError(f"code is {folder}, which is not a folder.")

    def chosen(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = Path(member.name).name
        return None if name == "__pycache__" or (name.startswith(".") and member.name != ".") else member

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        archive.add(folder, ".", filter=chosen)
    return packed.getvalue()


def _result_of(results: Mapping[int, Result]) -> LaunchResult:
    by_host: dict[str, list[tuple[int, Any]]] = {}
    for each in results.values():
        by_host.setdefault(each.host, []).append((each.local_rank, each.value))
    values = {host: [value for _, value in sorted(own, key=operator.itemgetter(0))] for host, own in by_host.items()}
    return LaunchResult(values, [each.value for each in results.values()])


def attach(name: str, namespace: str | None = None, **settings: Any) -> Launcher:  # noqa: ANN401 - checked by Launcher
    """Return a launcher that calls functions in the pods of a kept ElasticJob; with ``keep=False``, it then deletes it.

    Args:
        name: the name of the job.
        namespace: its namespace; None for that of the kubeconfig or of this pod.
        settings: other attributes of :class:`Launcher`.
    """
    return Launcher(hostnames="kubernetes", job=name, namespace=namespace, **{"keep": True, **settings})
