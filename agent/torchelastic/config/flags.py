"""The flags of ``torchelastic-run``: a table that defines values, help and environment variables.

Flags are torchrun's unless the help says otherwise, and have torchrun's environment variable ``PET_<NAME>``. The table
also has the operator's variables (:class:`~torchelastic.protocol.Env`).

argparse only prints the help: its parser would take flags of the program that look like ours, and drop a ``--`` that
belongs to the program.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torchelastic.config import parsing as of
from torchelastic.config.parsing import Given
from torchelastic.errors import SettingsError
from torchelastic.protocol import Env, ResumeRecord, SizeRecord

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

PROGRAM_NAME: Final = "torchelastic-run"
_MAX_RESTARTS: Final = 1_000_000
_MAX_NOTICE: Final = 86_400.0
_NODE_NAME_LIMIT: Final = 240
"""Leaves space for the suffix of a node's id within the limit of names."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        usage: the name without the leading dashes, and the placeholder of the value; a switch has no value.
        help: the text of ``--help``.
        read: parses the value.
        setting: the field of AgentSettings or RendezvousSettings, if its name differs from the flag's.
        short: the one-letter form.
        operators: the operator's variable, which the flag and its PET_ variable override.
    """

    usage: str
    help: str
    read: Callable[[Given], Any] = of.text
    setting: str = ""
    short: str = ""
    operators: str = ""

    @property
    def name(self) -> str:
        """The name without the leading dashes."""
        return self.usage.partition(" ")[0]

    @property
    def metavar(self) -> str:
        """The placeholder of the value; empty for a switch."""
        return self.usage.partition(" ")[2]

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that give the value if the command line does not; the first one wins."""
        return f"PET_{self.name.upper().replace('-', '_')}", self.operators


FLAGS: Final[Mapping[str, Sequence[Flag]]] = {
    "How many": (
        Flag("nnodes N|MIN:MAX", "number of nodes (2), or smallest and largest number (1:4). Default: 1", of.nodes),
        Flag(
            "nproc-per-node N|auto|cpu|gpu",
            "workers on this node: a number, or cpu or gpu for one on each, or auto for gpu if there is one and cpu "
            "otherwise. Default: 1",
        ),
        Flag(
            "max-restarts N",
            "failures of workers that the whole run may have, on all nodes. Default: 100",
            of.integer(0, _MAX_RESTARTS),
        ),
        Flag(
            "final-exit-codes CODE[-CODE][,…]",
            "exit codes of a worker after which the run fails at once, whatever restarts are left; 128 + n for signal "
            "n (not in torchrun)",
            of.exit_codes,
        ),
        Flag(
            "free-exit-codes CODE[-CODE][,…]",
            "exit codes of a worker after which all workers restart without a charge to --max-restarts, as long as "
            "they do not fail early again and again (not in torchrun)",
            of.exit_codes,
        ),
    ),
    "How the nodes meet": (
        Flag("rdzv-endpoint HOST[:2379][,…]", "servers of one etcd; http:// or https:// may stand in front"),
        Flag(
            "rdzv-id ID",
            "nodes with the same id train together; no other run on that etcd may have it. Required for several nodes; "
            "for one node, a random one is the default",
            setting="run_id",
        ),
        Flag(
            "rdzv-conf KEY=VALUE[,…]",
            "more settings. In seconds: join_timeout (how long too few nodes wait for more, 600), last_call_timeout "
            "(how long the first round waits for nodes above the minimum, 10), lease (after which a silent node counts "
            "as lost, 5), join_debounce (for which joins are collected, 0.05). About etcd: protocol (http or https), "
            "cacert, cert, key (files), tls (a folder that has them as ca.crt, tls.crt and tls.key, the last two only "
            "if etcd asks for them), username, password. About programs that fail at once: crash_loop_limit (failures "
            "in a row, 3), crash_loop_seconds (after the start, 10)",
        ),
        Flag(
            "rdzv-backend NAME",
            "torchelastic, the default (or etcd, which means the same); etcd-v3 or etcd-v2 to choose the server's API",
        ),
        Flag(
            "standalone",
            "a run of this node alone, without an etcd; the default if the only node has no endpoint",
            of.switch,
        ),
    ),
    "The program": (
        Flag("module", "the program is a Python module, as in python -m", of.switch, short="m"),
        Flag("no-python", "the program is a command; python FILE and python -m MODULE still start fast", of.switch),
        Flag(
            "start-method METHOD",
            "fork-server: from a process that has torch imported (default; also forkserver, fork). exec: by a new "
            "interpreter (also spawn)",
            of.start_method,
        ),
        Flag(
            "preload MODULE[,…]",
            "modules that the fork server imports beside torch, so that no worker has to (not in torchrun). They must "
            "not start threads or touch a GPU when they are imported",
            of.modules,
        ),
        Flag(
            "heartbeat-timeout SECONDS",
            "a worker that has not called torchelastic.heartbeat(), or touched the file $TORCHELASTIC_HEARTBEAT_FILE, "
            "for this time counts as hung, which is a failure (not in torchrun). Default: no limit",
            of.seconds(),
        ),
        Flag("role NAME", "role of the workers, for logs and metrics. Default: default", of.name()),
    ),
    "Output": (
        Flag("log-dir DIR", "write the workers' output to files, round_E/rank_R/ below this folder"),
        Flag(
            "redirects STREAMS",
            "streams that go to the files only: 0 none, 1 stdout, 2 stderr, 3 both; for all workers (3) or by local "
            "rank (0:1,1:3)",
            short="r",
        ),
        Flag("tee STREAMS", "streams that go to the files and to the console, written likewise", short="t"),
    ),
    "This node": (
        Flag(
            "local-addr ADDR",
            "address under which the other nodes reach it; gloo and NCCL use its interface. Default: the one that "
            "routes to etcd, and gloo and NCCL find theirs",
            of.address,
            setting="address",
            operators=Env.NODE_ADDRESS,
        ),
        Flag(
            "port-range FIRST-LAST",
            "ports on which it listens for the other nodes and serves the rounds' stores, at least 16 (not in "
            "torchrun). Default: any free ones",
            of.ports,
            setting="ports",
        ),
        Flag(
            "node-name NAME",
            "its name in logs and for the operator (not in torchrun). Default: host name",
            of.name(_NODE_NAME_LIMIT),
            operators=Env.NODE_NAME,
        ),
        Flag(
            "notice SECONDS",
            "time that workers which ask for it get at most to save before a planned change (not in torchrun). "
            "Default: 30",
            of.seconds(zero=True, most=_MAX_NOTICE),
        ),
        Flag(
            "stop-timeout SECONDS",
            "time between SIGTERM and SIGKILL when its workers end because the round does (not in torchrun). "
            "Default: 0, SIGKILL at once",
            of.seconds(zero=True),
        ),
        Flag(
            "stop-grace SECONDS",
            "time between SIGTERM and SIGKILL when its workers end because it leaves (not in torchrun). Default: 5",
            of.seconds(zero=True),
        ),
        Flag(
            "place NAME",
            "nodes with the same place get neighbouring ranks (not in torchrun). Default: the host",
            of.name(),
        ),
        Flag(
            "metrics-port PORT",
            "serve /metrics for Prometheus, 0 on any free port (not in torchrun)",
            of.integer(0, 65535),
            operators=Env.METRICS_PORT,
        ),
        Flag(
            "termination-log FILE",
            "file for the termination message, in JSON (not in torchrun)",
            of.path,
            operators=Env.TERMINATION_LOG,
        ),
    ),
    "Accepted for scripts written for torchrun": (
        Flag("monitor-interval SECONDS", "not needed: the end of a worker is seen at once", of.seconds()),
        Flag("node-rank RANK", "ignored, with a warning: the nodes agree on their ranks"),
        Flag("master-addr ADDR", "ignored, with a warning: the nodes agree on an address"),
        Flag("master-port PORT", "ignored, with a warning: a free port is used"),
    ),
}
"""The flags by the heading under which ``--help`` shows them."""

_FROM_OPERATOR: Final = (
    Flag("size", "how many nodes there may and should be", of.record(SizeRecord), operators=Env.SIZE),
    Flag("unique-run", "the run's id is never used again", of.switch, operators=Env.UNIQUE_RUN),
    Flag("resume", "the run before it was suspended", of.record(ResumeRecord), operators=Env.RESUME),
    Flag("job", "namespace and name of the job", of.job, operators=Env.JOB),
    Flag("job-created", "when the job was created", of.created, operators=Env.JOB_CREATED),
)
"""What only the operator gives, in variables."""

_BY_NAME: Final = {flag.name: flag for flags in FLAGS.values() for flag in flags}
_BY_LETTER: Final = {flag.short: flag for flag in _BY_NAME.values() if flag.short}
_ALL: Final = {**_BY_NAME, **{flag.name: flag for flag in _FROM_OPERATOR}}
_OLD_NAMES: Final = {"nnode": "nnodes"}
_NOTHING_LIKE_IT: Final = (
    "duplicate-stderr-filters duplicate-stdout-filters event-log-handler local-ranks-filter log-line-prefix-template "
    "numa-binding print-completion signals-to-handle virtual-local-rank"
)
NOT_HERE: Final = dict.fromkeys(_NOTHING_LIKE_IT.split(), "there is nothing like it here") | {
    "run-path": "the program is __main__ here in any case",
    "use-env": "LOCAL_RANK is in the workers' environment in any case",
    "logs-specs": "say where output goes with --log-dir, --redirects and --tee",
    "shutdown-timeout": "say it with --stop-grace",
}
"""Flags of torchrun that are not accepted, and why."""


class CommandLine:
    """The given flags and variables.

    Args:
        given: the given texts by flag name.
        program: the program and its arguments.

    Attributes:
        values: the parsed values by flag name.

    Raises:
        SettingsError: a value is invalid.
    """

    def __init__(self, given: Mapping[str, Given], program: tuple[str, ...] = ()) -> None:
        self.given = given
        self.program = program
        self.values: Mapping[str, Any] = {name: _ALL[name].read(value) for name, value in given.items()}

    def settings(self, kind: type) -> dict[str, Any]:
        """Return the values that are fields of this dataclass, by field."""
        fields = {each.name for each in dataclasses.fields(kind)}
        found = ((_ALL[name].setting or name.replace("-", "_"), value) for name, value in self.values.items())
        return {name: value for name, value in found if name in fields}


def read(argv: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Read the command line, and the environment for flags that are not given.

    Raises:
        SettingsError: a flag does not exist, or its value is missing or invalid.
        SystemExit: after ``--help`` or ``--version``.
    """
    given: dict[str, Given] = {}
    for name, flag in _ALL.items():
        variables = flag.variables if name in _BY_NAME else (flag.operators,)
        # An empty variable, as a manifest may have it, counts as not given.
        if (variable := next(filter(environ.get, variables), None)) is not None:
            given[name] = Given(variable, environ[variable])
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "-" or not word.startswith("-"):
            break
        position += 1
        if word == "--":
            break
        if word in {"-h", "--help", "--version"}:
            _parser().parse_args([word])
        flag, written, value = _flag_of(word)
        if not flag.metavar:
            if value is not None:
                raise SettingsError(f"{written} takes no value: leave out what follows it in {word}.")
            value = "1"
        elif value is None and position < len(argv):
            value = argv[position]
            position += 1
        if not value:
            raise SettingsError(f"{written} needs a value: {flag.metavar}.")
        given[flag.name] = Given(written, value, between=" ")
    return CommandLine(given, tuple(argv[position:]))


def _flag_of(word: str) -> tuple[Flag, str, str | None]:
    """Return the flag of a word, its spelling there, and its value if the word has one."""
    if word.startswith("--"):
        written, equals, value = word.partition("=")
        name = written[2:].replace("_", "-")
        name = _OLD_NAMES.get(name, name)
        if (flag := _BY_NAME.get(name)) is None:
            raise SettingsError(_unknown(written, name))
        return flag, written, value if equals else None
    written = word[:2]
    if (flag := _BY_LETTER.get(written[1])) is None:
        raise SettingsError(_unknown(written, written[1]))
    return flag, written, word[2:].removeprefix("=") if len(word) > 2 else None


def _unknown(written: str, name: str) -> str:
    if (why := NOT_HERE.get(name)) is not None:
        return f"{written} is a flag of torchrun that {PROGRAM_NAME} does not have: {why}. Leave it out."
    import difflib

    alike = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.45)
    hint = f"Did you mean --{alike[0]}?" if alike else f"{PROGRAM_NAME} --help lists all flags."
    return f"There is no flag {written}. {hint} (Flags of your own program go after its name.)"


def _parser() -> argparse.ArgumentParser:
    """Return the parser that prints ``--help`` and ``--version``; argparse is imported only for them."""
    import argparse
    import importlib.metadata

    parser = argparse.ArgumentParser(
        prog=PROGRAM_NAME,
        usage="%(prog)s [FLAG …] PROGRAM [ARGUMENT …]",
        description="Train elastically: run PROGRAM in several workers on each of one or more nodes, and go on when "
        "nodes or workers come, go or fail.",
        epilog="Every flag can also be given by an environment variable: PET_ and its name, as in PET_NNODES=1:4 or "
        "PET_STANDALONE=1; the command line wins. Underscores do as well as dashes. Everything after PROGRAM belongs "
        "to it. Example: %(prog)s --nnodes 1:4 --nproc-per-node gpu --rdzv-endpoint etcd-server --rdzv-id digits-7 "
        "train.py --lr 0.1",
    )
    version = importlib.metadata.version("elastic-operator")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}", help="show the version and exit")
    for heading, flags in FLAGS.items():
        group = parser.add_argument_group(heading)
        for flag in flags:
            names = [f"-{flag.short}"] * bool(flag.short) + [f"--{flag.name}"]
            how: dict[str, Any] = {"metavar": flag.metavar} if flag.metavar else {"action": "store_true"}
            group.add_argument(*names, help=flag.help, **how)
    return parser
