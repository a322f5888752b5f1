"""The flags of ``torchelastic-run``: a table that defines values, help and environment variables.

Each flag can also be set by torchrun's variable ``PET_<NAME>``. The operator's variables
(:class:`~torchelastic.protocol.pod.Env`) and the keys of ``--rdzv-conf`` are parsed like flags.

getopt parses the command line, because getopt stops at the first positional argument. argparse is used only to print
the help, because its import is slow.
"""

from __future__ import annotations

import dataclasses
import getopt
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchelastic.config import parsers
from torchelastic.config.parsers import RawValue
from torchelastic.errors import SettingsError
from torchelastic.protocol.pod import Env
from torchelastic.protocol.records import ResumeRecord, SizeRecord

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping, Sequence

PROGRAM_NAME: Final = "torchelastic-run"
_MAX_COUNT: Final = 1_000_000
_TIME: Final = parsers.seconds(zero=True)
_NODE_NAME_LIMIT: Final = 240
"""Maximum length of a node's name; it leaves space for the suffix of the node's id."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        usage: the name without the leading dashes, and the placeholder of the value; a switch has no value.
        help: the description for ``--help``.
        read: the parser of the value.
        short: the one-letter form; empty for none.
    """

    usage: str
    help: str
    read: Callable[[RawValue], Any] = parsers.string
    short: str = ""

    @property
    def name(self) -> str:
        """The name without the leading dashes."""
        return self.usage.partition(" ")[0]

    @property
    def metavar(self) -> str:
        """The placeholder of the value; empty for a switch."""
        return self.usage.partition(" ")[2]


CONF: Final[Mapping[str, Callable[[RawValue], Any]]] = {
    "join_timeout": parsers.seconds(),
    "last_call_timeout": parsers.seconds(zero=True),
    "lease": parsers.seconds(),
    "join_debounce": parsers.seconds(zero=True),
    "crash_loop_limit": parsers.integer(1, _MAX_COUNT),
    "crash_loop_seconds": parsers.seconds(zero=True),
    "protocol": parsers.one_of("http", "https"),
    "cacert": parsers.file,
    "cert": parsers.file,
    "key": parsers.file,
    "tls": parsers.tls_folder,
    "username": parsers.string,
    "password": parsers.string,
    "secret_file": parsers.text_file,
}
"""The keys of ``--rdzv-conf``, with the parsers of their values."""

CONF_ALIASES: Final = {"timeout": "join_timeout"}
"""Keys of torch's handlers, with torchelastic's key of the same meaning, which takes precedence if both are set."""

_IGNORED_TIMES: Final = frozenset({"close_timeout", "heartbeat_timeout", "keep_alive_interval", "read_timeout"})
_IGNORED_CONF: Final = _IGNORED_TIMES | frozenset(
    {"heartbeat", "is_host", "keep_alive_max_attempt", "rank", "shared", "store_type", "use_libuv"}
)
"""Keys of torch's handlers without a meaning for this rendezvous."""

FLAGS: Final[Mapping[str, Sequence[Flag]]] = {
    "Size": (
        Flag("nnodes N|MIN:MAX", "number of nodes, or minimum and maximum, as in 1:4. Default: 1", parsers.nodes),
        Flag(
            "nproc-per-node N|auto|cpu|gpu|xpu", "workers on this node; auto: one per GPU, else one per CPU. Default: 1"
        ),
        Flag("max-restarts N", "worker failures that the run survives. Default: 0", parsers.integer(0, _MAX_COUNT)),
        Flag(
            "non-retryable-exit-codes CODE[-CODE][,…]",
            "codes that fail the run; 128 + n for signal n",
            parsers.exit_codes,
        ),
        Flag(
            "uncharged-exit-codes CODE[-CODE][,…]", "codes that do not count against --max-restarts", parsers.exit_codes
        ),
    ),
    "Rendezvous": (
        Flag(
            "rdzv-endpoint HOST[:PORT][,…]",
            "with c10d or static, one of the nodes; else the endpoints of one etcd cluster, with http:// or https:// "
            "if needed. Default port: 29400 (c10d), 29500 (static), 2379",
        ),
        Flag("rdzv-id ID", "id of the run on all its nodes, unique in the etcd cluster; required with an etcd"),
        Flag("rdzv-conf KEY=VALUE[,…]", f"more settings of the rendezvous and of etcd: {', '.join(CONF)}"),
        Flag(
            "rdzv-backend NAME",
            "c10d or static: a node serves the rendezvous; torchelastic (alias: etcd), or etcd-v3 or etcd-v2 to select "
            "the API version: an etcd does. Default: torchelastic; static without --rdzv-endpoint",
        ),
        Flag("master-addr ADDR", "with static, the host of --rdzv-endpoint. Default: 127.0.0.1"),
        Flag("master-port PORT", "with static, the port of --rdzv-endpoint. Default: 29500"),
        Flag("node-rank RANK", "place of this node among the nodes, from 0", parsers.integer(0, _MAX_COUNT)),
        Flag("standalone", "run on this node only. Default with one node and no --rdzv-endpoint", parsers.switch),
    ),
    "Program": (
        Flag("module", "the program is a Python module, as in python -m", parsers.switch, short="m"),
        Flag(
            "no-python",
            "the program is a command; python FILE and python -m MODULE still use the fork server",
            parsers.switch,
        ),
        Flag(
            "start-method METHOD",
            "fork-server (aliases: forkserver, fork) or exec (alias: spawn). Default: fork-server",
            parsers.start_method,
        ),
        Flag(
            "preload MODULE[,…]",
            "modules to import in addition to torch and what workers import; none: only torch",
            parsers.modules,
        ),
        Flag("heartbeat-timeout SECONDS", "time without a heartbeat after which a worker is hung", parsers.seconds()),
        Flag(
            "warm-spare",
            "while this node is a spare, run the program up to its function with @elastic, so that it can take a "
            "place at once",
            parsers.switch,
        ),
        Flag("role NAME", "role of this node's workers. Default: default", parsers.name()),
        Flag("virtual-local-rank", "each worker has LOCAL_RANK 0 and sees only its own GPU", parsers.switch),
        Flag(
            "numa-binding MODE",
            "bind each worker to the CPUs near its GPU: node, socket, exclusive or core-complex",
            parsers.one_of("node", "socket", "exclusive", "core-complex"),
        ),
    ),
    "Output": (
        Flag(
            "log-dir DIR", "folder for the files of --redirects and --tee, in round_N/rank_R/. Default: a temporary one"
        ),
        Flag(
            "redirects STREAMS",
            "streams to write only to files: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank: 0:1,1:3",
            short="r",
        ),
        Flag("tee STREAMS", "streams to write to files and to the console, in the same format", short="t"),
        Flag(
            "log-line-prefix-template TEMPLATE",
            "text before each line of --tee on the console. Default: [${role_name}${local_rank}]:; also ${rank}, "
            "${hostname}",
        ),
        Flag("prefix", "write the rank before each line on the console", parsers.switch),
        Flag("local-ranks-filter RANK[,…]", "local ranks whose output is on the console. Default: all", parsers.ranks),
        Flag(
            "duplicate-stdout-filters TEXT[,…]",
            "copy the lines of stdout in --tee that contain a TEXT to filtered_stdout.log; ,, for a comma",
            parsers.texts,
        ),
        Flag(
            "duplicate-stderr-filters TEXT[,…]",
            "copy the lines of stderr in --tee that contain a TEXT to filtered_stderr.log",
            parsers.texts,
        ),
        Flag(
            "logs-specs NAME",
            "the LogsSpecs that chooses files and streams: an entry point of an installed package, in the group "
            "torchrun.logs_specs",
        ),
    ),
    "Node": (
        Flag("local-addr ADDR", "address for other nodes; gloo and NCCL use its network interface", parsers.address),
        Flag("port-range FIRST-LAST", "at least 16 ports to listen on. Default: any free ports", parsers.ports),
        Flag("node-name NAME", "name in logs and for the operator. Default: host name", parsers.name(_NODE_NAME_LIMIT)),
        Flag("notice SECONDS", "time to save a checkpoint before a planned change. Default: 30", _TIME),
        Flag(
            "stop-timeout SECONDS",
            "from SIGTERM to SIGKILL between two rounds, if a worker handles SIGTERM. Default: 5",
            _TIME,
        ),
        Flag(
            "rejoin-timeout SECONDS",
            "for a worker that stays, to leave its last round; then it is killed. Default: 10",
            parsers.seconds(),
        ),
        Flag(
            "shutdown-timeout SECONDS", "from the signal to SIGKILL when this node leaves the run. Default: 30", _TIME
        ),
        Flag(
            "signals-to-handle SIGNAL[,…]",
            "signals on which this node leaves the run. Default: SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            parsers.signals,
        ),
        Flag("topology-key NAME", "nodes with the same key get consecutive ranks. Default: host id", parsers.name()),
        Flag("metrics-port PORT", "port of /metrics for Prometheus; 0 for any free port", parsers.integer(0, 65535)),
        Flag("termination-log FILE", "file for the termination message, in JSON", lambda raw: Path(raw.text)),
    ),
    "Accepted for scripts written for torchrun": (
        Flag("run-path", "ignored: a script always runs as __main__ in a prepared process", parsers.switch),
        Flag("use-env", "ignored: workers read LOCAL_RANK from the environment", parsers.switch),
        Flag(
            "event-log-handler NAME",
            "only null is possible: the agent records no events for torch's handlers",
            parsers.one_of("null"),
        ),
        Flag("monitor-interval SECONDS", "ignored: the agent notices the exit of a worker at once", parsers.seconds()),
    ),
}
"""The flags by the heading under which ``--help`` shows them."""

_FROM_OPERATOR: Final[Mapping[str, tuple[str, Callable[[RawValue], Any]]]] = {
    "size": (Env.SIZE, parsers.record(SizeRecord)),
    "unique_run": (Env.UNIQUE_RUN, parsers.switch),
    "resume": (Env.RESUME, parsers.record(ResumeRecord)),
    "combined": (Env.COMBINED_OUTPUT, parsers.switch),
    "job": (Env.JOB, lambda raw: raw.text.rpartition("/")[::2]),
    "job_created": (Env.JOB_CREATED, _TIME),
    "certificates": (Env.ETCD_TLS, parsers.tls_folder),
}
"""The values that only the operator sets, with their variables and parsers."""

OPERATOR_VARIABLES: Final[Mapping[str, str]] = {
    "local-addr": Env.NODE_ADDRESS,
    "node-name": Env.NODE_NAME,
    "metrics-port": Env.METRICS_PORT,
    "termination-log": Env.TERMINATION_LOG,
    **{name: variable for name, (variable, _) in _FROM_OPERATOR.items()},
}
"""The operator's variables by the name of the value; a flag and its PET_ variable override them."""

_TORCH_VARIABLES: Final = {
    "log-line-prefix-template": "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    "shutdown-timeout": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    "signals-to-handle": "TORCHELASTIC_SIGNALS_TO_HANDLE",
}
"""Variables of torch's launcher that are not called ``PET_<NAME>``, by flag."""

SECRET_VARIABLE: Final = "TORCHELASTIC_RDZV_SECRET"  # noqa: S105 - a name
"""The variable with the secret that the nodes of a run share; it has no flag, because others can read arguments."""

_FIELDS: Final = {"rdzv-id": "run_id", "local-addr": "address", "port-range": "ports", "signals-to-handle": "signals"}
"""The fields of the settings whose names differ from the names of their flags, by flag."""

_BY_NAME: Final = {flag.name: flag for flags in FLAGS.values() for flag in flags}
_PARSERS: Final = {
    **{name: flag.read for name, flag in _BY_NAME.items()},
    **{name: read for name, (_, read) in _FROM_OPERATOR.items()},
    **CONF,
    "secret": parsers.string,
}
_SPELLINGS: Final = {
    **{f"--{name}": flag for flag in _BY_NAME.values() for name in (flag.name, flag.name.replace("-", "_"))},
    **{f"-{flag.short}": flag for flag in _BY_NAME.values() if flag.short},
}


class CommandLine:
    """The flags, variables and keys of ``--rdzv-conf`` that are set.

    Args:
        raw: the unparsed values by the name of the flag or key.
        program: the program and its arguments.

    Attributes:
        values: the parsed values by the same names.
    """

    def __init__(self, raw: Mapping[str, RawValue], program: tuple[str, ...] = ()) -> None:
        self.raw = raw
        self.program = program
        self.values: Mapping[str, Any] = {name: _PARSERS[name](value) for name, value in raw.items()}

    def settings(self, kind: type) -> dict[str, Any]:
        """Return the values that are fields of this dataclass, by field."""
        fields = {each.name for each in dataclasses.fields(kind)}
        found = ((_FIELDS.get(name, name.replace("-", "_")), value) for name, value in self.values.items())
        return {name: value for name, value in found if name in fields}


def from_variables(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, RawValue]:
    """Return the unparsed values by name; an empty variable, which a manifest may contain, is ignored."""
    return {name: RawValue(each, environ[each]) for name, each in variables.items() if environ.get(each)}


def read(argv: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Return the command line, with values from the environment for flags that it does not contain.

    Raises:
        SettingsError: a flag does not exist, or its value is missing or invalid.
        SystemExit: after ``--help`` or ``--version``.
    """
    torchrun_variables = {name: f"PET_{name.upper().replace('-', '_')}" for name in _BY_NAME}
    variables = {**_TORCH_VARIABLES, **OPERATOR_VARIABLES, "secret": SECRET_VARIABLE}
    raw = from_variables(environ, variables) | from_variables(environ, torchrun_variables)
    short = [written[1:] + (":" if flag.metavar else "") for written, flag in _SPELLINGS.items() if len(written) == 2]
    long = [written[2:] + ("=" if flag.metavar else "") for written, flag in _SPELLINGS.items() if len(written) > 2]
    try:
        options, program = getopt.getopt(argv, f"h{''.join(short)}", [*long, "help", "version"])
    except getopt.GetoptError as error:
        # `error.opt` has no dashes. A long flag of one letter is an ambiguous abbreviation, such as --n.
        raise SettingsError(_explained(f"{'--' if '--' in error.msg else '-'}{error.opt}")) from None
    for written, value in options:
        if (known := _SPELLINGS.get(written)) is None:
            argument_parser().parse_args([written])
        elif known.metavar and not value:
            raise SettingsError(_explained(written))
        else:
            raw[known.name] = RawValue(written, value.removeprefix("=") or "1", between=" ")
    own = environ.get("PET_RDZV_ENDPOINT")
    if own and raw["rdzv-endpoint"].text != own:  # a worker of a job starts another run
        raw.pop("certificates", None)  # they belong to the etcd of the job
    if (conf := raw.get("rdzv-conf")) is not None:
        raw |= read_conf(conf.source, split_conf(conf))
    return CommandLine(raw, tuple(program))


def read_conf(source: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, RawValue]:
    """Return the values of ``--rdzv-conf`` by torchelastic's names of the keys.

    Raises:
        SettingsError: a key does not exist, or an ignored time is invalid, as for torch's handlers.
    """
    conf: dict[str, RawValue] = {}
    for written, value in pairs:
        name, raw = written.replace("-", "_"), RawValue(f"{source} {written}", f"{value}")
        if name in _IGNORED_TIMES:
            parsers.seconds()(raw)
        if name in _IGNORED_CONF:
            continue
        key = CONF_ALIASES.get(name, name)
        if key not in CONF:
            known = (*CONF, *CONF_ALIASES)
            hint = _similar(name, known) or f"The keys are {', '.join(known)}."
            raise SettingsError(f'{source}: there is no key "{written}". {hint}')
        if key == name or key not in conf:
            conf[key] = raw
    return conf


def split_conf(conf: RawValue) -> list[tuple[str, str]]:
    """Return the unparsed keys and values of ``--rdzv-conf``."""
    text = conf.text.strip()
    if text[:1] in {"'", '"'} and text[1:].endswith(text[0]):  # of a script that quotes twice
        text = text[1:-1]
    found = [pair.partition("=")[::2] for pair in text.split(",") if pair.strip()]
    if not all(value.strip() for _, value in found):
        # Any part may be a password.
        raise conf.error("it takes KEY=VALUE pairs, separated by commas; a value cannot contain a comma", secret=True)
    return [(key.strip(), value.strip()) for key, value in found]


def _explained(written: str) -> str:
    """Return the error message for a flag that does not exist or is used incorrectly."""
    flag = _SPELLINGS.get(written)
    if flag is not None and flag.metavar:
        return f"{written} needs a value: {flag.metavar}."
    if flag is not None or written in {"--help", "--version"}:
        return f"{written} takes no value."
    name = written.lstrip("-").replace("_", "-")
    hint = _similar(name, [*_BY_NAME], "--") or f"{PROGRAM_NAME} --help lists all flags."
    return f"There is no flag {written}. {hint} (Flags of your own program go after its name.)"


def _similar(name: str, known: Sequence[str], before: str = "") -> str:
    import difflib

    longer = [each for each in known if each.startswith(name)]
    similar = longer[:1] or difflib.get_close_matches(name, known, n=1, cutoff=0.45)
    return f"Did you mean {before}{similar[0]}?" if similar else ""


def argument_parser(defaults: Mapping[str, Any] | None = None) -> argparse.ArgumentParser:
    """Return a parser for ``--help`` and ``--version``, or, with defaults, for whole command lines.

    argparse is imported only for it. A value has the type of its default; the attributes have torchrun's names.
    """
    import argparse
    import importlib.metadata

    parser = argparse.ArgumentParser(
        prog=PROGRAM_NAME,
        usage="%(prog)s [FLAG …] PROGRAM [ARGUMENT …]",
        description="Run PROGRAM in several workers on one or more nodes. Training continues when nodes join or leave, "
        "and when workers fail.",
        epilog="Each flag can also be set by the environment variable PET_<NAME>, as in PET_NNODES=1:4 or "
        "PET_STANDALONE=1. The command line takes precedence. Underscores and dashes are equivalent. All arguments "
        "after PROGRAM are passed to it. Example: %(prog)s --nnodes 1:4 --nproc-per-node gpu --rdzv-endpoint etcd "
        "--rdzv-id digits-7 train.py --lr 0.1",
    )
    version = importlib.metadata.version("elastic-operator")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}", help="show the version and exit")
    for heading, flags in FLAGS.items():
        group = parser.add_argument_group(heading)
        for flag in flags:
            names = [f"-{flag.short}", f"--{flag.name}"] if flag.short else [f"--{flag.name}"]
            how: dict[str, Any] = {"metavar": flag.metavar} if flag.metavar else {"action": "store_true"}
            if defaults is not None:
                names += [f"--{flag.name.replace('-', '_')}"] if "-" in flag.name else []
                if flag.name in defaults:
                    how |= {"default": defaults[flag.name], "type": type(defaults[flag.name])}
            group.add_argument(*names, help=flag.help, **how)
    if defaults is not None:
        parser.add_argument("training_script", metavar="PROGRAM")
        parser.add_argument("training_script_args", metavar="ARGUMENT", nargs=argparse.REMAINDER)
    return parser
