"""The fork server imports what ``--preload`` names and what workers import, but nothing that would break workers."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import AgentProcess
from tests.support.etcd import until_keys
from tests.support.programs import output_of, script
from tests.support.workers import next_exit, start_workers, workers_of
from torchelastic.config.settings import LogSettings, Program, ProgramKind, StartMethod
from torchelastic.errors import StartError
from torchelastic.protocol.codec import decode
from torchelastic.protocol.keys import RunKeys
from torchelastic.protocol.pod import ExitCode
from torchelastic.protocol.records import HistoryRecord

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.support.etcd import EtcdServer
    from torchelastic.store.api import Entry

pytestmark = pytest.mark.integration

MODEL = """
import os
IMPORTED_BY = os.getpid()
os.environ.setdefault("SET_BY_THE_MODEL", "yes")
"""

TELLS_WHO_IMPORTED = """
import sys
there = "model" in sys.modules
import os, model
here = os.path.dirname(__file__)
print(there, model.IMPORTED_BY == os.getpid(), os.environ["SET_BY_THE_MODEL"], sys.path.count(here))
"""


async def refusal(folder: Path, source: str) -> str:
    """Return the error message about a module with this source."""
    (folder / "model.py").write_text(source)
    async with workers_of(script(folder, "", preload=["json", "model"])) as workers:
        with pytest.raises(StartError) as refused:
            await workers.fork_server.ready()
    return f"{refused.value}"


async def test_a_module_beside_the_program_is_imported_once_for_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (tmp_path / "model.py").write_text(f"{MODEL}\nprint('loading', end='')")
    program = script(tmp_path, TELLS_WHO_IMPORTED, preload=["model"])
    async with workers_of(program, LogSettings(tmp_path / "logs", combined=True), 2) as workers:
        await workers.fork_server.ready()
        group = await start_workers(workers, {}, {"SET_BY_THE_MODEL": "the worker's"})
        assert [(await next_exit(group)).exit_code for _ in range(2)] == [0, 0]
    logs = [(tmp_path / f"logs/round_1/rank_{rank}/output.log").read_text() for rank in range(2)]
    assert logs == ["True False yes 1\n", "True False the worker's 1\n"]
    assert capfd.readouterr().err.count("loading") == 1


async def test_a_module_in_the_working_directory_is_found_for_a_module_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    script(tmp_path, TELLS_WHO_IMPORTED)
    monkeypatch.chdir(tmp_path)
    program = Program(ProgramKind.MODULE, ("program",), preload=("model",))
    assert await output_of(program, tmp_path / "logs") == "True False yes 1\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import sys; sys.exit('no data')", "the module cannot be imported: SystemExit: no data"),
        (
            "import threading; threading.Thread(target=threading.Event().wait, name='feeder', daemon=True).start()",
            "it leaves threads behind ('feeder')",
        ),
        (
            "import torch; torch.set_num_threads(3); torch.ones(999, 999) @ torch.ones(999, 999)",
            "it leaves threads behind, such as those of an OpenMP pool",
        ),
        ("import torch; torch.cuda._initialized = True", "it initializes CUDA"),
    ],
    ids=["exit", "thread", "OpenMP", "CUDA"],
)
async def test_a_module_that_would_break_the_workers_is_refused_by_name(source: str, said: str, tmp_path: Path) -> None:
    sentence = await refusal(tmp_path, source)
    assert sentence.startswith("--preload model: ")
    assert said in sentence


async def test_a_fork_safe_thread_pool_does_not_prevent_forking(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import numpy\nnumpy.ones((999, 999)) @ numpy.ones((999, 999))")
    program = script(tmp_path, "import model; print(model.numpy.ones((999, 999)).sum())", preload=["model"])
    assert await output_of(program, tmp_path / "logs", {}) == "998001.0\n"


async def test_an_agent_refuses_a_module_that_cannot_be_imported_before_it_joins(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import nowhere")
    [program] = script(tmp_path, "").argv
    async with AgentProcess("--preload", "model", program) as agent:
        assert await agent.code() == ExitCode.BAD_INPUT
    [line] = agent.lines
    assert line.startswith("torchelastic-run: --preload model: the module cannot be imported: ModuleNotFoundError")


async def test_a_module_that_ends_the_fork_server_is_reported(tmp_path: Path) -> None:
    said = await refusal(tmp_path, "import os; os._exit(3)")
    assert "the fork server dies repeatedly while it imports torch, json, model" in said


async def test_executed_programs_preload_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = script(tmp_path, "print('here')", preload=["nowhere"], start_method=StartMethod.EXEC)
    assert await output_of(program, tmp_path / "logs") == "here\n"
    assert "--preload has no effect" in caplog.text


TRAINS = """
import os, sys, tempfile
there = "torch._dynamo" in sys.modules
print(tempfile.tempdir, os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", "/set/by/the/program"), there)
import torch
layer = torch.nn.Linear(2, 2)
layer(torch.ones(2)).sum().backward()
vars(torch)["optim"].SGD(layer.parameters()).step()  # hidden from the agent, which reads the program
sys.exit(not there)
"""


async def test_modules_that_torch_imports_for_training_are_preloaded_for_later_workers(tmp_path: Path) -> None:
    [program] = script(tmp_path, TRAINS).argv
    restart = ("--max-restarts=1000", "--rdzv-conf=crash_loop_limit=1000")  # until they are preloaded
    async with AgentProcess(*restart, program) as agent:
        assert await agent.code() == ExitCode.SUCCEEDED
    printed = [line for line in agent.lines if "/set/by/the/program" in line]
    assert printed[0] == "[rank 0] None /set/by/the/program False"
    assert printed[-1] == "[rank 0] None /set/by/the/program True"


INSTALLED = {
    "heavy": "",
    "threaded": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "of_a_rank": "import os; os.environ['RANK']",
    "asks_for_rank": "import os; RANK = os.getenv('RANK', '0')",
    "fatal": "import os; 'LOCAL_RANK' in os.environ or os._exit(3)",
    "asks_for_cuda": "import torch; torch.cuda.is_available()",
    "configured": "",
}

IMPORTS = f"""
import os, sys
learned = [name for name in {[*INSTALLED, "beside"]} if name in sys.modules]
print("learned", *learned)
import beside, heavy, threaded, of_a_rank, asks_for_rank, fatal, asks_for_cuda
os.environ["CONFIGURED"] = "yes"
import configured
sys.exit(not learned)
"""


def install(folder: Path, sources: dict[str, str]) -> str:
    """Write modules into a new folder of installed packages; return the folder."""
    installed = folder / "site-packages"
    installed.mkdir()
    for name, source in sources.items():
        (installed / f"{name}.py").write_text(source)
    return f"{installed}"


@pytest.mark.parametrize(("flags", "learned"), [([], "learned heavy"), (["--preload=none"], "learned")])
async def test_what_a_worker_imports_from_site_packages_is_preloaded_for_later_workers(
    flags: list[str], learned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", install(tmp_path, INSTALLED))
    (tmp_path / "beside.py").touch()
    [program] = script(tmp_path, IMPORTS).argv
    restart = ("--max-restarts=1", "--rdzv-conf=crash_loop_limit=1000")
    async with AgentProcess(*restart, *flags, program) as agent:
        assert await agent.code() == (ExitCode.FAILED if flags else ExitCode.SUCCEEDED)
    assert [line for line in agent.lines if line.startswith("[rank 0] learned")] == [
        "[rank 0] learned",
        f"[rank 0] {learned}",
    ]


@pytest.mark.parametrize(
    ("beginning", "flags", "once"),
    [
        ("'A docstring.'\nfrom __future__ import annotations\nimport os, heavy as h", [], True),
        ("import os\nfrom heavy import *\nimport threaded, heavy as h", [], True),
        ("import os, threaded\nimport heavy as h", [], False),
        ("import os, asks_for_rank\nimport heavy as h", [], False),
        ("import os\nimport beside\nimport heavy as h", [], False),
        ("import os\nimport project\nimport heavy as h", [], False),
        ("import os\nos.environ['CONFIGURED'] = 'yes'\nimport heavy as h", [], False),
        ("import os, heavy as h", ["--preload=none"], False),
    ],
    ids=[
        "first statements",
        "before a refused module",
        "after a refused module",
        "after a module that reads the rank",
        "after a module of its own",
        "after a module that is not installed",
        "after a statement",
        "turned off",
    ],
)
async def test_what_a_program_imports_first_is_imported_once_for_all_workers(
    beginning: str, flags: list[str], once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heavy = "import os; BY, CONFIGURED = os.getpid(), 'CONFIGURED' in os.environ"
    (tmp_path / "src").mkdir()
    (tmp_path / "src/project.py").write_text("import os; os.environ['CONFIGURED'] = 'yes'")
    installed = install(tmp_path, INSTALLED | {"heavy": heavy})
    monkeypatch.setenv("PYTHONPATH", f"{installed}:{tmp_path / 'src'}")
    (tmp_path / "beside.py").touch()
    [program] = script(tmp_path, f"{beginning}\nprint('once', h.BY != os.getpid(), h.CONFIGURED)").argv
    async with AgentProcess("--nproc-per-node=2", *flags, program) as agent:
        assert await agent.code() == ExitCode.SUCCEEDED
    configured = "CONFIGURED" in beginning or "project" in beginning
    assert sorted(line for line in agent.lines if "once" in line) == [
        f"[rank {rank}] once {once} {configured}" for rank in range(2)
    ]


STEPS = """
import sys
print("learned", "heavy" in sys.modules)
import heavy, signal, torchelastic
torchelastic.step()
signal.pause()
"""


async def test_a_node_that_joins_imports_first_what_the_workers_of_the_run_import(
    etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", install(tmp_path, {"heavy": ""}))
    [program] = script(tmp_path, STEPS).argv
    run = str(uuid.uuid4())
    flags = (f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run}", "--local-addr=127.0.0.1", "--nnodes=1:2")

    def shared(keys: Mapping[str, Entry]) -> bool:
        return any("heavy" in decode(entry.value, HistoryRecord).imports for entry in keys.values())

    async with AgentProcess(*flags, program) as first:
        await first.wait_for_line("learned False")
        await until_keys(etcd.settings, RunKeys(run).history, shared)
        async with AgentProcess(*flags, program) as second:
            await second.wait_for_line("learned True")
