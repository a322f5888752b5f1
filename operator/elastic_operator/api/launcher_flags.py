"""Splits a launcher's command line into its own flags and the program; detects commands that start a launcher.

The rules are the same for torchrun and ``torchelastic-run``. The agent checks the flags; the operator only has to know
which ones are given, to find settings that are given twice.
"""

from __future__ import annotations

import functools
import re
import shlex
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
_SPEAKS_OF_LAUNCHER: Final = "torch"
_SHELLS: Final = frozenset({"ash", "bash", "dash", "ksh", "sh", "zsh"})
_SCRIPT_FLAG: Final = re.compile(r"-[A-Za-z]*c")
"""A shell's flags in one word, the last of which is followed by a script."""
_BETWEEN_COMMANDS: Final = "();<>|&\n"
_BEFORE_COMMANDS: Final = frozenset({"!", "do", "else", "exec", "if", "nohup", "then", "time", "while", "{"})
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_PYTHON: Final = re.compile(r"python[0-9.]*")
_PYTHON_FLAGS: Final = re.compile(r"-(?=[^-])[^cmWX]*(?P<taking>[cmWX]?)(?P<value>.*)", re.DOTALL)
"""Python's own flags in one word; the last one may take a value, perhaps in the next word."""


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


@functools.lru_cache(maxsize=256)
def starts_launcher(command: tuple[str, ...]) -> bool:
    """Whether a command is a launcher, or starts one by ``env`` or in the script of a shell."""
    words = list(command)
    if words and words[0].rpartition("/")[2] == "env":
        words = _after_environment(words[1:])
    name = words[0].rpartition("/")[2] if words else ""
    if name in _SHELLS:
        script = _script_of(words[1:])
        # Parsing is slow, and most scripts do not start a launcher.
        return _SPEAKS_OF_LAUNCHER in script and any(after_launcher(each) is not None for each in _commands_of(script))
    return after_launcher(words) is not None


def program_is_launcher(args: Sequence[str]) -> bool:
    """Whether a launcher with these arguments would start another launcher."""
    flags = list(launcher_flags(args))
    program = list(args[sum(len(flag.words) for flag in flags) :])
    if program[:1] == ["--"]:
        program.pop(0)
    if any(flag.name in ("m", "module") for flag in flags):
        return bool(program) and program[0] in _LAUNCHER_MODULES
    return starts_launcher(tuple(program))


def _after_environment(words: Sequence[str]) -> list[str]:
    """The command that ``env`` runs with these arguments."""
    left = list(words)
    while left and (left[0].startswith("-") or _ASSIGNMENT.fullmatch(left[0])):
        if left.pop(0) in ("-u", "-C"):
            del left[:1]
    return left


def _script_of(words: Sequence[str]) -> str:
    """The script among a shell's arguments; empty if there is none, or a file."""
    for position, word in enumerate(words):
        if _SCRIPT_FLAG.fullmatch(word):
            return next(iter(words[position + 1 :]), "")
        if not word.startswith(("-", "+")):
            break
    return ""


def _commands_of(script: str) -> Iterator[list[str]]:
    """The commands of a shell's script, approximately."""
    lexer = shlex.shlex(script.replace("\\\n", " "), posix=True, punctuation_chars=_BETWEEN_COMMANDS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    command: list[str] = []
    before = ""
    try:
        for word in lexer:
            if set(word) <= set(_BETWEEN_COMMANDS):
                yield command
                # A command in $( ) is run for its output; it does not train.
                command = ["$("] if before.endswith("$") and word.startswith("(") else []
            elif command or not (word in _BEFORE_COMMANDS or _ASSIGNMENT.fullmatch(word)):
                command.append(word)
            before = word
    except ValueError:  # an unclosed quote
        return
    yield command


def _module_of(words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """The module that Python runs with these arguments, and what follows it; None if it runs something else."""
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
