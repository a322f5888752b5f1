"""A worker behaves like its program in a plain interpreter, for every kind of program."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import zipapp
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.agents import AgentProcess
from tests.support.programs import by_hand, hand_command, output_of, run, script
from torchelastic.config.parse import program_of_command
from torchelastic.config.settings import Program, ProgramKind, StartMethod

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.integration


PROBE = Path(__file__).parents[1] / "support" / "probe.py"

OURS = {
    "LOCAL_RANK",
    "PROBE_OUT",
    "RANK",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_PROCESS_TREE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}


def comparable(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(path.read_text())
    for name in OURS:
        facts["environment"].pop(name, None)
    for number in ("1", "2"):  # only the output destination differs
        facts["descriptors"].pop(number)
    return facts


@pytest.fixture
def unusual_settings() -> Iterator[None]:
    """Give this process an unusual umask and an unusual limit of open files."""
    umask, limit = os.umask(0o027), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[0] - 7, limit[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    os.umask(umask)


@pytest.mark.usefixtures("unusual_settings")
@pytest.mark.parametrize(
    "program",
    [
        Program(ProgramKind.SCRIPT, ("./code/probe.py", "--depth", "2", "")),
        Program(ProgramKind.MODULE, ("code.probe", "-x")),
        Program(ProgramKind.MODULE, ("code",)),
        Program(ProgramKind.SCRIPT, ("code/probe.py",), StartMethod.EXEC),
        Program(ProgramKind.COMMAND, (sys.executable, "code/probe.py")),
    ],
    ids=lambda program: f"{program.kind}-{program.argv[0].rpartition('/')[2]}-{program.start_method}",
)
async def test_a_program_runs_as_in_a_plain_interpreter(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "code"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(PROBE, package / "probe.py")
    shutil.copy(PROBE, package / "__main__.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_AGENT", "kept \udcff")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    hand, worker = tmp_path / "hand.json", tmp_path / "worker.json"
    env = {"OF_THE_ROUND": "7", "OF_THE_AGENT": "laid over"}
    unbuffered = {} if program.start_method is StartMethod.FORK_SERVER else {"PYTHONUNBUFFERED": "1"}
    if program.kind is ProgramKind.COMMAND:
        unbuffered = {}
    by_hand(hand_command(program), {**env, **unbuffered, "PROBE_OUT": str(hand)})
    await run(program, tmp_path / "logs", {**env, "PROBE_OUT": str(worker)})
    assert comparable(worker) == comparable(hand)


@pytest.mark.parametrize("where", ["code", "code.pyz"])
async def test_a_program_in_a_folder_or_an_archive_runs_as_in_a_plain_interpreter(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "code"
    package.mkdir()
    (package / "other.py").write_text("NUMBER = 7")
    (package / "__main__.py").write_text(
        "import other, sys\nprint(other.NUMBER, other.__file__, __file__, __spec__.origin, sys.path[0], sys.argv)"
    )
    zipapp.create_archive(package, tmp_path / "code.pyz")
    monkeypatch.chdir(tmp_path)
    program = Program(ProgramKind.SCRIPT, (where, "-x"))
    assert await output_of(program, tmp_path / "logs") == by_hand(hand_command(program), {}).stdout


@pytest.mark.parametrize(
    ("program", "exit_code", "message"),
    [
        (Program(ProgramKind.MODULE, ("nowhere",)), 1, "No module named nowhere"),
        (Program(ProgramKind.SCRIPT, (".",)), 1, "can't find '__main__' module in"),
        (Program(ProgramKind.COMMAND, ("no-such-command",)), 127, "no-such-command cannot be executed: No such file"),
        (Program(ProgramKind.COMMAND, ("/etc/passwd",)), 126, "/etc/passwd cannot be executed: Permission denied"),
        (Program(ProgramKind.SCRIPT, ("broken.py",)), 1, "SyntaxError: invalid syntax (broken.py, line 1)"),
        (Program(ProgramKind.SCRIPT, ("wordless.py",)), 1, "Wordless"),
    ],
    ids=lambda value: value.argv[0] if isinstance(value, Program) else "",
)
async def test_a_worker_reports_in_one_sentence_why_its_program_cannot_run(
    program: Program, exit_code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("if\n")
    (tmp_path / "wordless.py").write_text(
        "class Wordless(Exception):\n    def __str__(self):\n        raise KeyError('none')\nraise Wordless\n"
    )
    end, printed = await run(program, tmp_path / "logs")
    assert end.exit_code == exit_code
    assert message in end.cause.message
    if program.kind is not ProgramKind.COMMAND:
        assert printed == by_hand(hand_command(program), {}).stdout


async def test_a_program_exits_as_in_a_plain_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "end.py"
    script.write_text(
        """
import atexit, os, sys, threading, time, torch

class Left:
    def __del__(self, write=os.write):
        write(1, b"deleted\\n")

left = Left()
unflushed = open(sys.argv[1], "w")
unflushed.write("not lost")
atexit.register(print, "atexit")
threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
print("end of the program")
"""
    )
    program = Program(ProgramKind.SCRIPT, (str(script), str(tmp_path / "unflushed")))
    end, printed = await run(program, tmp_path / "logs")
    assert end.exit_code == 0
    assert (tmp_path / "unflushed").read_text() == "not lost"
    assert printed == "end of the program\nthread\natexit\ndeleted\n"
    assert printed == by_hand(hand_command(program), {"PYTHONUNBUFFERED": "1"}).stdout


@pytest.mark.parametrize(("name", "hidden"), [("torchgen.py", True), ("torchgen/x", False)])
async def test_a_worker_with_a_module_that_shadows_a_torch_import_is_executed(
    name: str, hidden: bool, tmp_path: Path
) -> None:
    source = "import sys; print('torch' in sys.modules); import torchgen; print(torchgen.__file__)"
    program = script(tmp_path, source)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    forked, place = (await output_of(program, tmp_path / "logs")).splitlines()
    assert (forked == "True") is not hidden
    assert place == by_hand(hand_command(program), {}).stdout.splitlines()[1]


async def test_a_worker_with_interpreter_flags_is_executed(tmp_path: Path) -> None:
    path = script(tmp_path, "import sys; print(sys.flags.dev_mode, sys._xoptions, 'torch' in sys.modules)").argv[0]
    program = program_of_command(["python", "-X", "dev", path])
    assert await output_of(program, tmp_path / "logs") == "True {'dev': True} False\n"


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("statement", "method"),
    [
        ('os.environ["OMP_NUM_THREADS"] = "1"', StartMethod.FORK_SERVER),
        ('os.environ["OMP_NUM_THREADS"] = "1"', StartMethod.EXEC),
        ('os.environ.pop("OMP_NUM_THREADS"); os.environ.setdefault("OMP_NUM_THREADS", "1")', StartMethod.FORK_SERVER),
        ('os.environ.update(OMP_NUM_THREADS="1")', StartMethod.FORK_SERVER),
        ('os.environ.update({"A": "b", "OMP_NUM_THREADS": "1"})', StartMethod.FORK_SERVER),
        ('os.environ |= {"OMP_NUM_THREADS": "1"}', StartMethod.FORK_SERVER),
    ],
    ids=["assigned", "executed", "default", "updated", "updated from a dict", "merged"],
)
async def test_a_program_sees_variables_that_it_sets_before_importing_torch(
    statement: str, method: StartMethod, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = f"import os, sys\n{statement}\nimport torch\nprint(torch.get_num_threads())"
    program = script(tmp_path, source, start_method=method)
    assert await output_of(program, tmp_path / "logs") == "1\n"
    warning = "program.py sets OMP_NUM_THREADS, which torch reads when it is imported"
    assert caplog.text.count(warning) == (method is StartMethod.FORK_SERVER)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    "source",
    [
        "from torch import nn; import os; os.environ['OMP_NUM_THREADS'] = '1'",
        "import os; os.environ['HOME'] = os.environ['CUDA_VISIBLE_DEVICES'] = '/nowhere'; import torch",
        "# os.environ['OMP_NUM_THREADS'] = '1'\nimport torch",
        "import os; print(end=os.environ.get('OMP_NUM_THREADS') == '7' and 'x' or ''); import torch",
        f"import torch; class_ = type('C', (), {{'update': lambda self, _: self}}); class_(){'.update({1: 2})' * 500}",
    ],
    ids=["after the import", "read later", "in a comment", "not set", "nested deeply"],
)
async def test_any_other_program_is_forked(source: str, tmp_path: Path) -> None:
    program = script(tmp_path, f"import sys; print('torch' in sys.modules)\n{source}")
    assert await output_of(program, tmp_path / "logs") == "True\n"


async def test_a_program_runs_in_a_folder_that_cannot_be_listed(tmp_path: Path) -> None:
    folder = tmp_path / "hidden"
    folder.mkdir()
    (folder / "program.py").write_text("import numpy\nprint(numpy.ones(3).sum())")
    folder.chmod(0o300)
    bounds = "--bounding-set=-dac_override,-dac_read_search"  # root may list any folder
    within = ("setpriv", bounds) if os.geteuid() == 0 else ()
    async with AgentProcess("--standalone", folder / "program.py", within=within) as agent:
        assert await agent.code() == 0
    assert "[rank 0] 3.0" in agent.lines
    assert "PermissionError" not in agent.output
