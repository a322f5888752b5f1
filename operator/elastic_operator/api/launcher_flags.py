"""Splits a launcher's command line into its own flags and the program; detects commands that start a launcher.

The rules are the same for torchrun and ``torchelastic-run``. The agent checks the flags; the operator only has to know
which ones are given, to find settings that are given twice.
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
_MODULE: Final = "|".join(map(re.escape, sorted(_LAUNCHER_MODULES)))
_PYTHON: Final = re.compile(r"python[0-9.]*")
_MODULE_FLAG: Final = re.compile(r"-[bBdEiIOPqsSuvx]*m(.*)")
"""Python's own flags in one word, the last of which is followed by a module."""

_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_SHELLS: Final = frozenset({"ash", "bash", "dash", "ksh", "sh", "zsh"})
_SCRIPT_FLAG: Final = re.compile(r"-[A-Za-z]*c")
"""A shell's flags in one word, the last of which is followed by a script."""
_LAUNCHER_IN_SCRIPT: Final = re.compile(
    r"(?:^|[;&|\n{]|(?<!\$)\()\s*"  # a command in $( ) is run for its output; it does not train
    r"(?:(?:!|do|else|exec|if|nohup|then|time|while)\s+|[A-Za-z_]\w*=\S*\s+)*"
    rf"(?:\S*/)?(?:torchrun|torchelastic-run|python[0-9.]*\s+(?:-\w+\s+)*-m\s*(?:{_MODULE}))(?:\s|;|$)"
)
"""A launcher at the start of a command, approximately: quotes and escapes are not interpreted."""


@dataclass(frozen=True, slots=True)
class LauncherFlag:
    """A flag before the program.

    Attributes:
        name: without leading dashes, and with inner dashes: nproc-per-node, m; the current name of a renamed flag.
        value: its value; empty for a switch, or if it is missing.
        words: the words as given, one or two.
    """

    name: str
    value: str
    words: tuple[str, ...]


def launcher_flags(words: Sequence[str]) -> Iterator[LauncherFlag]:
    """The flags at the beginning of a launcher's arguments; the program, or ``--``, follows them."""
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
    """What follows the launcher in a command that begins with one; None if it does not."""
    name = command[0].rpartition("/")[2] if command else ""
    if name in _LAUNCHERS:
        return tuple(command[1:])
    if not _PYTHON.fullmatch(name):
        return None
    module, after = _module_of(command[1:])
    return after if module in _LAUNCHER_MODULES else None


def starts_launcher(command: Sequence[str]) -> bool:
    """Whether a command is a launcher, or starts one by ``env`` or in the script of a shell."""
    words = list(command)
    if words and words[0].rpartition("/")[2] == "env":
        words.pop(0)
        while words and (words[0].startswith("-") or _ASSIGNMENT.fullmatch(words[0])):
            if words.pop(0) in ("-u", "-C"):
                del words[:1]
    if not words or words[0].rpartition("/")[2] not in _SHELLS:
        return after_launcher(words) is not None
    for position, word in enumerate(words[1:], 2):
        if _SCRIPT_FLAG.fullmatch(word):
            return any(_LAUNCHER_IN_SCRIPT.search(script) for script in words[position : position + 1])
        if not word.startswith(("-", "+")):
            break
    return False


def program_is_launcher(args: Sequence[str]) -> bool:
    """Whether a launcher with these arguments would start another launcher."""
    flags = list(launcher_flags(args))
    program = list(args[sum(len(flag.words) for flag in flags) :])
    if program[:1] == ["--"]:
        program.pop(0)
    if any(flag.name in ("m", "module") for flag in flags):
        return bool(program) and program[0] in _LAUNCHER_MODULES
    return starts_launcher(program)


def _module_of(words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """The module that Python runs with these arguments, and what follows it; None if it runs something else."""
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "-c":
        flag = left.pop(0)
        if (module := _MODULE_FLAG.fullmatch(flag)) is not None:
            return (module[1] or (left.pop(0) if left else "")), tuple(left)
        if flag in ("-W", "-X"):
            del left[:1]
    return None, ()
