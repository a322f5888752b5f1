"""A command line of this interpreter is run as a Python program; any other command line is executed unchanged."""

from __future__ import annotations

import sys

import pytest

from torchelastic.agent.workers.program import program_of_command
from torchelastic.config.settings import Program, ProgramKind, StartMethod

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.parametrize("python", ["python", "python3", VERSION, sys.executable])
def test_a_script_or_module_of_this_interpreter_is_a_python_program(python: str) -> None:
    assert program_of_command([python, "x.py", "-m", "y"]) == Program(ProgramKind.SCRIPT, ("x.py", "-m", "y"))
    assert program_of_command([python, "-m", "pkg.mod", "-v"]) == Program(ProgramKind.MODULE, ("pkg.mod", "-v"))


@pytest.mark.parametrize(
    "argv",
    [
        ("nvidia-smi",),
        ("python",),
        ("python", "-u", "x.py"),
        ("python", "-c", "pass"),
        ("python", "-m"),
        ("python", "-"),
        ("python2", "x.py"),
        ("python3.1", "x.py"),
        ("/opt/other/bin/python", "x.py"),
        ("bash", "-c", "python x.py"),
    ],
)
def test_any_other_command_line_is_a_command(argv: tuple[str, ...]) -> None:
    assert program_of_command(argv) == Program(ProgramKind.COMMAND, argv)


def test_the_start_method_is_kept() -> None:
    assert program_of_command(["python", "x.py"], StartMethod.EXEC).start_method is StartMethod.EXEC
