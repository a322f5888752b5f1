"""The flags of ``torchelastic-run``: which there are, where each value comes from, and where the program begins.

Every flag is torchrun's unless its help says otherwise, and has torchrun's environment variable, ``PET_`` and the name.
What the values mean is read in :mod:`torchelastic.arguments`; here they are text with the name of their source, so that
a message can say which flag or variable to change.

Only the help is argparse's. Where the program begins, nothing may be read any more: argparse reads flags of the program
that look like ours, and drops a ``--`` that is meant for the program; how much of that depends on its version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torchelastic.errors import SettingsError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

PROGRAM_NAME: Final = "torchelastic-run"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        name: without the leading dashes.
        help: for ``--help``.
        metavar: what stands for its value in the help; None for a switch.
        short: a single letter that does the same, or nothing.
    """

    name: str
    help: str
    metavar: str | None = None
    short: str = ""

    @property
    def variable(self) -> str:
        """The environment variable that gives the value where the command line does not."""
        return "PET_" + self.name.upper().replace("-", "_")


FLAGS: Final[Mapping[str, Sequence[Flag]]] = {
    "How many": (
        Flag("nnodes", "number of nodes (2), or the smallest and the largest number (1:4). Default: 1", "N|MIN:MAX"),
        Flag(
            "nproc-per-node",
            "workers on this node: a number, or cpu or gpu for one on each, or auto for gpu where there are any and "
            "cpu elsewhere. Default: 1",
            "N|auto|cpu|gpu",
        ),
        Flag("max-restarts", "failures of workers that the whole run may have, on all nodes. Default: 100", "N"),
        Flag(
            "final-exit-codes",
            "exit codes of a worker after which the run fails at once, whatever restarts are left; 128 + n for signal "
            "n (not in torchrun)",
            "CODE[-CODE][,…]",
        ),
        Flag(
            "free-exit-codes",
            "exit codes of a worker after which all start anew without a charge to --max-restarts, as long as they do "
            "not fail early again and again (not in torchrun)",
            "CODE[-CODE][,…]",
        ),
    ),
    "How the nodes meet": (
        Flag("rdzv-endpoint", "servers of one etcd; http:// or https:// may stand in front", "HOST[:2379][,…]"),
        Flag(
            "rdzv-id",
            "nodes with the same id train together; no other run on that etcd may have it. Needed for more than one "
            "node; else a random one",
            "ID",
        ),
        Flag(
            "rdzv-conf",
            "more about the meeting. In seconds: join_timeout (how long too few nodes wait for more, 600), "
            "joining_window (how long the first epoch waits for nodes above the minimum, 10), lease (after which a "
            "silent node counts as lost, 5), gather (for which joins are collected, 0.05). About etcd: protocol (http "
            "or https), cacert, cert, key (files), tls (a folder that has them as ca.crt, tls.crt and tls.key, the "
            "last two only where they are needed), username, password. About programs that fail at once: "
            "early_failures (in a row, 3), early_seconds (after the start, 10)",
            "KEY=VALUE[,…]",
        ),
        Flag(
            "rdzv-backend",
            "torchelastic, the default (or etcd, which means the same); etcd-v3 or etcd-v2 where the server's API is "
            "not to be found out",
            "NAME",
        ),
        Flag(
            "standalone", "a run of this node alone, without an etcd; the default where the only node has no endpoint"
        ),
    ),
    "The program": (
        Flag("module", "the program is a Python module, as in python -m", short="m"),
        Flag("no-python", "the program is a command; python FILE and python -m MODULE still start fast"),
        Flag(
            "start-method",
            "fork-server: from a process that has torch imported (default; also forkserver, fork). exec: by a new "
            "interpreter (also spawn)",
            "METHOD",
        ),
        Flag(
            "preload",
            "modules that the fork server imports beside torch, so that no worker has to (not in torchrun). They must "
            "not start threads or touch a GPU when they are imported",
            "MODULE[,…]",
        ),
        Flag(
            "heartbeat-timeout",
            "a worker that has not called torchelastic.heartbeat(), or touched the file $TORCHELASTIC_HEARTBEAT_FILE, "
            "for so long counts as hung, which is a failure (not in torchrun). Default: none does",
            "SECONDS",
        ),
        Flag("role", "role of the workers, for logs and metrics. Default: default", "NAME"),
    ),
    "Output": (
        Flag("log-dir", "write the workers' output to files, epoch_E/rank_R/ below this folder", "DIR"),
        Flag(
            "redirects",
            "streams that go to the files only: 0 none, 1 stdout, 2 stderr, 3 both; for all workers (3) or by local "
            "rank (0:1,1:3)",
            "STREAMS",
            short="r",
        ),
        Flag("tee", "streams that go to the files and to the console, written likewise", "STREAMS", short="t"),
    ),
    "This node": (
        Flag(
            "local-addr",
            "address under which the other nodes reach it; gloo and NCCL use its interface. Default: the one that "
            "routes to etcd, and gloo and NCCL find theirs",
            "ADDR",
        ),
        Flag(
            "port-range",
            "ports on which it listens for the other nodes and serves the epochs' stores, at least 16 (not in "
            "torchrun). Default: any free ones",
            "FIRST-LAST",
        ),
        Flag("node-name", "how it is called in logs and by the operator (not in torchrun). Default: host name", "NAME"),
        Flag(
            "notice",
            "time that workers which ask for it get at most to save before a planned change (not in torchrun). "
            "Default: 30",
            "SECONDS",
        ),
        Flag(
            "stop-timeout",
            "time between SIGTERM and SIGKILL when its workers end because the epoch does (not in torchrun). "
            "Default: 0, SIGKILL at once",
            "SECONDS",
        ),
        Flag(
            "stop-grace",
            "time between SIGTERM and SIGKILL when its workers end because it leaves (not in torchrun). Default: 5",
            "SECONDS",
        ),
        Flag(
            "place",
            "nodes with the same place get neighbouring ranks (not in torchrun). Default: the host",
            "NAME",
        ),
        Flag("metrics-port", "serve /metrics for Prometheus, 0 on any free port (not in torchrun)", "PORT"),
        Flag("termination-log", "file for the last words, in JSON (not in torchrun)", "FILE"),
    ),
    "Accepted for scripts written for torchrun": (
        Flag("monitor-interval", "not needed: the end of a worker is seen at once", "SECONDS"),
        Flag("node-rank", "ignored, with a warning: the nodes agree on their ranks", "RANK"),
        Flag("master-addr", "ignored, with a warning: the nodes agree on an address", "ADDR"),
        Flag("master-port", "ignored, with a warning: a free port is used", "PORT"),
    ),
}
"""The flags by the heading under which ``--help`` shows them."""

_BY_NAME: Final = {flag.name: flag for flags in FLAGS.values() for flag in flags}
_BY_LETTER: Final = {flag.short: flag for flag in _BY_NAME.values() if flag.short}
_OLD_NAMES: Final = {"nnode": "nnodes"}
_NOT_HERE: Final = {
    "run-path": "the program is __main__ here in any case",
    "use-env": "LOCAL_RANK is in the workers' environment in any case",
    "logs-specs": "say where output goes with --log-dir, --redirects and --tee",
    "shutdown-timeout": "say it with --stop-grace",
} | dict.fromkeys(
    (
        "duplicate-stderr-filters",
        "duplicate-stdout-filters",
        "event-log-handler",
        "local-ranks-filter",
        "log-line-prefix-template",
        "numa-binding",
        "print-completion",
        "signals-to-handle",
        "virtual-local-rank",
    ),
    "there is nothing like it here",
)
"""Flags of torchrun that are not taken, and why."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was given.

    Attributes:
        source: the flag or environment variable, as the user writes it.
        text: the value.
        between: what stands between the two where both are shown.
    """

    source: str
    text: str
    between: str = "="

    def refused(self, why: str, *, secret: bool = False) -> SettingsError:
        """The error that says what is wrong with it; with ``secret``, without showing the value."""
        shown = "" if secret else f"{self.between}{self.text}"
        return SettingsError(f"{self.source}{shown}: {why}{'' if why.endswith('?') else '.'}")

    def integer(self, least: int, most: int) -> int:
        """The value as a whole number within bounds (both included).

        Raises:
            SettingsError: it is none.
        """
        # Longer texts are out of every bound, and int() of very long ones is refused with an error of its own.
        if not self.text.strip().isdecimal() or len(self.text) > 20 or not least <= int(self.text) <= most:
            raise self.refused(f"this is a whole number from {least} to {most}")
        return int(self.text)

    def seconds(self, *, zero: bool = False, most: float = math.inf) -> float:
        """The value as a time in seconds, at most ``most``; 0 only where ``zero`` allows it.

        Raises:
            SettingsError: it is none.
        """
        try:
            value = float(self.text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise self.refused(f"this is a time in seconds, {'0 or more' if zero else 'above 0'}")
        if value > most:
            raise self.refused(f"this is a time of at most {most:,.0f} seconds")
        return value

    def switch(self) -> bool:
        """The value as on or off.

        Raises:
            SettingsError: it is neither.
        """
        match self.text.strip().lower():
            case "1" | "true" | "yes":
                return True
            case "0" | "false" | "no":
                return False
            case _:
                raise self.refused("this is 1 for on or 0 for off")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What was asked for, as text.

    Attributes:
        values: by flag name; flags that were not given, here or in the environment, are absent.
        program: the program and its arguments, untouched.
    """

    values: Mapping[str, Given]
    program: tuple[str, ...]

    def get(self, name: str) -> Given | None:
        """The value of a flag, None where it was not given."""
        return self.values.get(name)

    def has(self, name: str) -> bool:
        """Whether a switch is on."""
        given = self.values.get(name)
        return given is not None and given.switch()


def read(argv: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Take the command line apart; what it does not give is taken from the PET_* variables.

    Raises:
        SettingsError: there is no such flag, or its value is missing.
        SystemExit: after ``--help`` or ``--version``.
    """
    values = {
        name: Given(flag.variable, environ[flag.variable])
        for name, flag in _BY_NAME.items()
        if environ.get(flag.variable)  # a variable in a manifest that is "" means that it is not given
    }
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
        if flag.metavar is None:
            if value is not None:
                raise SettingsError(f"{written} takes no value: leave out what follows it in {word}.")
            value = "1"
        elif value is None and position < len(argv):
            value = argv[position]
            position += 1
        if not value:
            raise SettingsError(f"{written} needs a value: {flag.metavar}.")
        values[flag.name] = Given(written, value, between=" ")
    return CommandLine(values, tuple(argv[position:]))


def _flag_of(word: str) -> tuple[Flag, str, str | None]:
    """The flag that a word names, how it is written there, and the value where the word has it too."""
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
    if (why := _NOT_HERE.get(name)) is not None:
        return f"{written} is a flag of torchrun that {PROGRAM_NAME} does not have: {why}. Leave it out."
    import difflib

    alike = (
        [known for known in _BY_NAME if known.startswith(name)]
        or difflib.get_close_matches(name, _BY_NAME, n=1)
        or [known for known in _BY_NAME if name.startswith(known.partition("-")[0])]
    )
    hint = f"Did you mean --{alike[0]}?" if alike else f"{PROGRAM_NAME} --help lists those there are."
    return f"There is no flag {written}. {hint} (Flags of your own program go after its name.)"


def _parser() -> argparse.ArgumentParser:
    """What writes ``--help`` and ``--version``; an agent that starts has no use for it, nor time."""
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
            if flag.metavar is None:
                group.add_argument(*names, action="store_true", help=flag.help)
            else:
                group.add_argument(*names, metavar=flag.metavar, help=flag.help)
    return parser
