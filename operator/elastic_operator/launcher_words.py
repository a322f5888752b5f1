"""Which words of a launcher's command line are flags of its own, and where the program begins.

torchrun and ``torchelastic-run`` agree in that. The operator does not judge the flags (the agent does); it has to know
which ones there are, to see what a manifest says twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SWITCHES: Final = frozenset({"m", "module", "no-python", "run-path", "standalone", "use-env"})
"""Flags without a value."""

_OLD_NAMES: Final = {"nnode": "nnodes"}

_LAUNCHERS: Final = frozenset({"torchrun", "torchelastic-run"})
_LAUNCHER_MODULES: Final = frozenset(
    {"torch.distributed.launch", "torch.distributed.run", "torchelastic.distributed.launch", "torchelastic.run"}
)
_PYTHON: Final = re.compile(r"python[0-9.]*")
_PYTHON_FLAGS: Final = re.compile(r"-(?=[^-])[^cmWX]*(?P<taking>[cmWX]?)(?P<value>.*)", re.DOTALL)
"""Python's own flags in one word; the last of them may take a value, which may be a word of its own."""


@dataclass(frozen=True, slots=True)
class LauncherFlag:
    """A flag before the program.

    Attributes:
        name: without the leading dashes, and with dashes inside: nproc-per-node, m; where it has an old name, today's.
        value: what is given with it; empty for a switch, or where it is missing.
        words: how it stands there, in one word or two.
    """

    name: str
    value: str
    words: tuple[str, ...]


def launcher_flags(words: Sequence[str]) -> Iterator[LauncherFlag]:
    """The flags at the beginning of a launcher's arguments; what follows their words is the program, or ``--``."""
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] not in ("-", "--"):
        word = words[position]
        long = word.startswith("--")
        written, equals, value = word.partition("=") if long else (word[:2], word[2:], word[2:].removeprefix("="))
        name = written.lstrip("-").replace("_", "-")
        name = _OLD_NAMES.get(name, name)
        taken = words[position : position + 1 if equals or name in _SWITCHES else position + 2]
        if len(taken) > 1:
            value = taken[1]
        yield LauncherFlag(name, value, tuple(taken))
        position += len(taken)


def after_launcher(command: Sequence[str]) -> tuple[str, ...] | None:
    """What follows the launcher in a command that begins with one; None where it does not."""
    name = command[0].rpartition("/")[2] if command else ""
    if name in _LAUNCHERS:
        return tuple(command[1:])
    if not _PYTHON.fullmatch(name):
        return None
    module, after = _module_of(command[1:])
    return after if module in _LAUNCHER_MODULES else None


def program_is_launcher(args: Sequence[str]) -> bool:
    """Whether what a launcher with these arguments starts is a launcher once more."""
    flags = list(launcher_flags(args))
    program = list(args[sum(len(flag.words) for flag in flags) :])
    if program[:1] == ["--"]:
        program.pop(0)
    if any(flag.name in ("m", "module") for flag in flags):
        return bool(program) and program[0] in _LAUNCHER_MODULES
    return after_launcher(program) is not None


def _module_of(words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """The module that Python runs with these arguments, and what follows it; None where it runs something else."""
    left = list(words)
    while left and (flags := _PYTHON_FLAGS.fullmatch(left[0])):
        taking, value = flags["taking"], flags["value"]
        left.pop(0)
        if taking and not value:
            value = left.pop(0) if left else ""
        if taking == "m":
            return value, tuple(left)
        if taking == "c":
            break
    return None, ()
