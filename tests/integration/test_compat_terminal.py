"""What a user sees of ``torchelastic-run`` and of torchrun, side by side: output, signals and exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import WithoutSettings
from tests.support.ports import free_range
from tests.support.terminals import Terminal
from tests.support.workers import lives, poll_until

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [
    pytest.mark.integration,
    pytest.mark.parametrize("module", ["torch.distributed.run", "torchelastic.run"]),
]

ASKS = """
import sys
print("half", end="\\r", flush=True)
answer = input("name? ")
print(f"<{answer}> {sys.stdin.isatty()} {sys.stdout.isatty()} {sys.stderr.isatty()}")
"""

HANDLES = """
import os, pathlib, signal, sys

def handle(number, frame):
    print(f"got {signal.Signals(number).name}", flush=True)
    open(sys.argv[1]).read()
    print("saved", flush=True)
    sys.exit()

for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
    signal.signal(number, handle)
try:
    print("ready", flush=True)
    if os.environ["RANK"] == "1":
        open(sys.argv[2]).read()
        sys.exit(3)
    while True:
        signal.pause()
except KeyboardInterrupt:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher may pass on the signal that the terminal has sent
    print("interrupted", flush=True)
    open(sys.argv[1]).read()
finally:
    print("finally", flush=True)
"""
"""A worker that, on a signal, reads a pipe and then exits. Rank 1 fails after it has read another pipe."""


class OnTerminal(Terminal):
    """A launcher on a terminal."""

    def __init__(self, module: str, folder: Path, *argv: str) -> None:
        super().__init__(folder, "-m", module, "--standalone", *argv)

    program = ()


LEAKS = """
import os, signal, sys, time
import torch
from multiprocessing.shared_memory import SharedMemory

torch.multiprocessing.set_sharing_strategy("file_system")
ours = SharedMemory(create=True, size=1000)._name.encode()
torchs = torch.ones(1000).untyped_storage()._share_filename_cpu_()[1]
os.write(1, b"shared %s\\nshared %s\\n" % (ours, torchs))
if "torchelastic.run" in sys.argv and os.fork() == 0:
    time.sleep(600)  # with the connections to the helpers of Python and torch that remove shared memory
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A program that fails and leaves shared memory; under our agent, which kills it, a child keeps the memory open."""

LEAVES = """
import os, signal, subprocess, sys

child = subprocess.Popen(["sleep", "600"]).pid
started = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(writing, str(os.getpid()).encode())
        signal.pause()
    os._exit(0)
open(sys.argv[1], "w").write(f"{child} {started} {os.read(reading, 20).decode()}")
"""
"""A program that leaves a child, and two processes in sessions of their own, and writes their ids to a file."""


@pytest.fixture
def handling(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The program ``HANDLES`` and its pipes."""
    (program := tmp_path / "handles.py").write_text(HANDLES)
    saved, fail = tmp_path / "saved", tmp_path / "fail"
    for pipe in (saved, fail):
        os.mkfifo(pipe)
    return program, saved, fail


async def test_a_worker_has_the_terminal_of_its_launcher(module: str, tmp_path: Path) -> None:
    (program := tmp_path / "asks.py").write_text(ASKS)
    async with OnTerminal(module, tmp_path, str(program)) as terminal:
        await terminal.shows("half\r")
        await terminal.shows("name? ")
        terminal.type("digits\n")
        assert await terminal.exit_code() == 0
        await terminal.shows("<digits> True True True")


async def test_redirected_output_and_input_have_only_what_the_program_reads_and_writes(
    module: str, tmp_path: Path
) -> None:
    (program := tmp_path / "asks.py").write_text(ASKS)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--standalone", str(program)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(b"digits\n")
    assert (process.returncode, out) == (0, b"half\rname? <digits> False False False\n"), err.decode()


async def test_ctrl_c_is_a_keyboard_interrupt_and_the_program_has_time(
    module: str, tmp_path: Path, handling: tuple[Path, Path, Path]
) -> None:
    program, saved, fail = handling
    async with OnTerminal(module, tmp_path, str(program), str(saved), str(fail)) as terminal:
        await terminal.shows("ready")
        terminal.type("\x03")
        await terminal.shows("interrupted")
        await asyncio.to_thread(saved.write_text, "")
        await terminal.shows("finally")
        assert await terminal.exit_code() == (130 if module == "torchelastic.run" else 1)


@pytest.mark.differs(
    "An agent that leaves on a signal exits with 128 and the signal's number, such as 143 for SIGTERM. torchrun exits "
    "with 1."
)
@pytest.mark.parametrize(
    ("number", "flags"),
    [
        (signal.SIGTERM, []),
        (signal.SIGHUP, []),
        (signal.SIGQUIT, []),
        (signal.SIGUSR1, ["--signals-to-handle=SIGTERM,SIGUSR1"]),
    ],
)
async def test_signals_reach_the_program_and_it_has_time(
    module: str, number: signal.Signals, flags: list[str], handling: tuple[Path, Path, Path]
) -> None:
    async with WithoutSettings(module, "--standalone", *flags, *handling) as launcher:
        await launcher.wait_for_line("^ready")
        launcher.kill(number)
        await launcher.wait_for_line(f"^got {number.name}")
        await asyncio.to_thread(handling[1].write_text, "")
        await launcher.wait_for_line("^saved")
        assert await launcher.code() == (128 + number if module == "torchelastic.run" else 1)


@pytest.mark.differs("Under `nohup`, the agent and its workers ignore SIGHUP. torchrun and its workers exit.")
async def test_the_hangup_signal_is_ignored_under_nohup_unlike_under_torchrun(module: str, tmp_path: Path) -> None:
    (program := tmp_path / "hangup.py").write_text(
        "import os, signal\nfor pid in (os.getppid(), os.getpid()): os.kill(pid, signal.SIGHUP)\nprint('alive')"
    )
    async with WithoutSettings(module, "--standalone", program, within=["nohup"]) as launcher:
        assert (await launcher.code() == 0) is (module == "torchelastic.run")
    assert ("alive" in launcher.lines) is (module == "torchelastic.run")


async def test_the_failure_of_a_rank_is_sigterm_for_the_others_and_they_have_time(
    module: str, handling: tuple[Path, Path, Path]
) -> None:
    async with WithoutSettings(module, "--standalone", "--nproc-per-node=2", *handling) as launcher:
        await launcher.wait_for_line("^ready")
        await asyncio.to_thread(handling[2].write_text, "")
        await launcher.wait_for_line("^got SIGTERM")
        await asyncio.to_thread(handling[1].write_text, "")
        await launcher.wait_for_line("^saved")
        assert await launcher.code() == 1


@pytest.mark.differs(
    "A Python program runs in a process that has already imported torch; see [how workers are "
    "started](#how-workers-are-started). torchrun starts a new interpreter."
)
async def test_a_program_starts_with_torch_imported_unlike_under_torchrun(module: str, tmp_path: Path) -> None:
    (program := tmp_path / "imported.py").write_text("import sys; print('torch' in sys.modules)")
    async with WithoutSettings(module, "--standalone", program) as launcher:
        assert await launcher.code() == 0
    assert str(module == "torchelastic.run") in launcher.lines


@pytest.mark.differs(
    "Three failures in a row soon after the start end the run, even if `--max-restarts` is higher "
    "(`--rdzv-conf crash_loop_limit=N` changes the number). torchrun restarts the workers `--max-restarts` times."
)
async def test_three_early_failures_end_a_run(module: str, tmp_path: Path) -> None:
    (program := tmp_path / "fails.py").write_text("print('begins', flush=True)\nraise SystemExit(3)")
    flags = ("--standalone", "--max-restarts=3", "--monitor-interval=0.02")
    async with WithoutSettings(module, *flags, program) as launcher:
        assert await launcher.code() == 1
    assert launcher.lines.count("begins") == (3 if module == "torchelastic.run" else 4)


async def test_workers_are_not_restarted_by_default(module: str, tmp_path: Path) -> None:
    (program := tmp_path / "fails.py").write_text("print('begins', flush=True)\nraise SystemExit(3)")
    async with WithoutSettings(module, "--standalone", program) as launcher:
        assert await launcher.code() == 1
    assert launcher.lines.count("begins") == 1


@pytest.mark.differs(
    "When a run has succeeded, the agent kills the processes that its workers left behind in their sessions. torchrun "
    "leaves them running. Under both, processes in sessions of their own continue."
)
async def test_processes_in_sessions_of_their_own_survive_a_run_that_succeeds(module: str, tmp_path: Path) -> None:
    (program := tmp_path / "leaves.py").write_text(LEAVES)
    ids = tmp_path / "ids"
    async with WithoutSettings(module, "--standalone", "--tee=3", program, ids) as launcher:
        assert await launcher.code() == 0  # although the processes hold the workers' streams open
    pids = [*map(int, ids.read_text().split())]
    left = [pid for pid in pids if lives(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == (pids[1:] if module == "torchelastic.run" else pids)


async def test_shared_memory_that_workers_leave_is_removed(module: str, tmp_path: Path) -> None:
    (program := tmp_path / "leaks.py").write_text(LEAKS)
    async with WithoutSettings(module, "--standalone", "--max-restarts=1", program, module) as launcher:
        assert await launcher.code() == 1
    left = [Path("/dev/shm", name) for line in launcher.lines for name in re.findall("(?<=^shared /).*", line)]
    assert len(left) == 4
    await poll_until(lambda: not any(path.exists() for path in left))


async def test_the_streams_of_a_program_fit_their_files(module: str, tmp_path: Path) -> None:
    (program := tmp_path / "streams.py").write_text(
        "import sys\nsys.stdout.reconfigure(encoding='utf-8')\nprint(sys.stdin.seekable(), sys.stdout.name)\n"
    )
    output = tmp_path / "output"
    to_file = ("sh", "-c", f'"$@" > {output} < /dev/null', "sh")
    async with WithoutSettings(module, "--standalone", "--tee=3", program, within=to_file) as launcher:
        assert await launcher.code() == 0, launcher.output
    assert output.read_text().splitlines()[-1].endswith("True <stdout>")


@pytest.mark.parametrize(
    "flags",
    [
        "--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --rdzv-conf=is_host=1,timeout=60 --run-path",
        "--rdzv_backend=static --master_addr=localhost --master_port={port} --node_rank=0",
        "--nnodes=1:1 --rdzv-id=digits --rdzv-backend=c10d --rdzv-endpoint=localhost:{port}",
    ],
)
async def test_one_node_runs_with_any_rendezvous_of_torch(module: str, flags: str, tmp_path: Path) -> None:
    (program := tmp_path / "ranks.py").write_text(
        'import os; os.write(1, f\'rank {os.environ["RANK"]} {os.environ["WORLD_SIZE"]}\\n\'.encode())'
    )
    flags = flags.format(port=free_range(1).first)
    async with WithoutSettings(module, "--nproc-per-node=2", *flags.split(), program) as launcher:
        assert await launcher.code() == 0
    assert {"rank 0 2", "rank 1 2"} <= {*launcher.lines}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("--local-ranks-filter=1", "rank 1"),
        ("--redirects=0:3", "rank 1"),
        ("--log-dir=logs", "rank 0,rank 1"),
        ("--tee=1", "[default0]:rank 0,[default1]:rank 1"),
        ("--tee=1:1 --role=eval --local-ranks-filter=1", "[eval1]:rank 1"),
        (
            "--tee=1 --log-line-prefix-template=${role_name}/$local_rank/$rank/$x:",
            "default/0/0/$x:rank 0,default/1/1/$x:rank 1",
        ),
        ("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=${rank}| --tee=1", "0|rank 0,1|rank 1"),
    ],
)
async def test_the_console_has_the_chosen_streams_with_the_chosen_prefix(
    module: str, settings: str, expected: str, tmp_path: Path
) -> None:
    (program := tmp_path / "ranks.py").write_text("import os; os.write(1, b'rank %s\\n' % os.environb[b'RANK'])")
    words = settings.split()
    flags = ("--standalone", "--nproc-per-node=2", *(word for word in words if word.startswith("--")))
    environ = ("env", f"--chdir={tmp_path}", *(word for word in words if not word.startswith("--")))
    async with WithoutSettings(module, *flags, program, within=environ) as launcher:
        assert await launcher.code() == 0
    assert ",".join(sorted(line for line in launcher.lines if re.search(r"rank \d$", line))) == expected


@pytest.mark.differs(
    "The files of `--redirects` and `--tee` are in `round_N/rank_R/` below `--log-dir`, and nothing overwrites them. "
    "Those of torchrun are in `ID_…/attempt_N/LOCAL_RANK/`."
)
async def test_lines_of_all_ranks_that_contain_a_text_are_copied_to_a_file(module: str, tmp_path: Path) -> None:
    (program := tmp_path / "fruit.py").write_text(
        "import os, sys\n"
        "for line in ('an apple', 'a, b', 'a pear'): os.write(1, f'{line} {os.environ[\"RANK\"]}\\n'.encode())\n"
        "os.write(2, b'an apple, a pear')\n"
    )
    filters = ("--duplicate-stdout-filters=apple,a,, b", "--duplicate_stderr_filters=pear")
    flags = ("--standalone", "--nproc-per-node=2", f"--log-dir={tmp_path}", "--tee=0:3,1:1", *filters)
    async with WithoutSettings(module, *flags, program) as launcher:
        assert await launcher.code() == 0
    found = {path.name: sorted(path.read_text().splitlines()) for path in tmp_path.rglob("filtered_*.log")}
    assert found == {
        "filtered_stdout.log": [f"[default{rank}]:{line} {rank}" for rank in (0, 1) for line in ("a, b", "an apple")],
        "filtered_stderr.log": ["[default0]:an apple, a pear"],
    }
    folders = {path.parent.name for path in tmp_path.rglob("stdout.log")}
    assert folders == ({"rank_0", "rank_1"} if module == "torchelastic.run" else {"0", "1"})


async def test_logs_specs_of_an_installed_package_choose_the_files(module: str, tmp_path: Path) -> None:
    (tmp_path / "own_logs.py").write_text(
        "import os\n"
        "from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs\n"
        "class OwnLogs(DefaultLogsSpecs):\n"
        "    def reify(self, envs):\n"
        "        files = super().reify(envs)\n"
        "        for rank, env in envs.items():\n"
        "            env['SECRET'] = f'of {rank}'\n"
        "            files.stdouts[rank] = os.path.join(self.root_log_dir, f'{env[\"RANK\"]}.txt')\n"
        "        return files\n"
    )
    (package := tmp_path / "own_logs-1.dist-info").mkdir()
    (package / "METADATA").write_text("Name: own-logs\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[torchrun.logs_specs]\nown = own_logs:OwnLogs\n")
    (program := tmp_path / "secret.py").write_text(
        "import os, sys; print(os.environ['SECRET']); sys.stderr.write('x\\n')"
    )
    flags = ("--standalone", "--nproc-per-node=2", f"--log-dir={tmp_path}", "--logs-specs=own", "--redirects=1:2")
    async with WithoutSettings(module, *flags, program, within=("env", f"PYTHONPATH={tmp_path}")) as launcher:
        assert await launcher.code() == 0
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["of 0\n", "of 1\n"]
    assert launcher.lines.count("x") == 1
    assert [path.read_text() for path in tmp_path.rglob("stderr.log")] == ["x\n"]


async def test_redirected_output_without_a_folder_goes_to_a_temporary_folder(module: str, tmp_path: Path) -> None:
    (program := tmp_path / "streams.py").write_text("import sys; print('to the file'); print('shown', file=sys.stderr)")
    environ = ("env", f"TMPDIR={tmp_path}", "LOGLEVEL=INFO")
    async with WithoutSettings(module, "--standalone", "--redirects=1", program, within=environ) as launcher:
        assert await launcher.code() == 0
    assert "shown" in launcher.lines
    [file] = tmp_path.glob("torchelastic*/**/stdout.log")
    assert file.read_text() == "to the file\n"
    folder = file.relative_to(tmp_path).parts[0]
    assert any(folder in line for line in launcher.lines), "the folder is named"


NESTED = """
import subprocess, sys
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", sys.argv[1]]
    assert subprocess.run(command).returncode == 1
    raise RuntimeError("no model")

main()
"""
"""A program that fails after a launcher that it runs has failed."""


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (["fails.py"], "ValueError: no data for rank 0"),
        (["nested.py", "fails.py"], "RuntimeError: no model"),
        (["-m", "torch.distributed.run", "--standalone", "fails.py"], "ValueError: no data for rank 0"),
    ],
    ids=["a program", "a program after a nested launcher", "a nested launcher"],
)
async def test_the_error_file_of_the_launcher_has_the_root_cause(
    module: str, program: Sequence[str], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "nested.py").write_text(NESTED)
    (tmp_path / "fails.py").write_text(
        "import os\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    raise ValueError(f'no data for rank {os.environ[\"RANK\"]}')\n"
        "main()\n"
    )
    (error := tmp_path / "error.json").write_text("of an earlier run")
    environ = ("env", f"--chdir={tmp_path}", f"TORCHELASTIC_ERROR_FILE={error}")
    async with WithoutSettings(module, "--standalone", *program, within=environ) as launcher:
        assert await launcher.code() == 1
    message = json.loads(error.read_text())["message"]
    assert expected in message["message"]
    assert message["extraInfo"]["py_callstack"].startswith("Traceback")


async def test_a_warning_of_the_compiler_is_printed_once(module: str, tmp_path: Path) -> None:
    (program := tmp_path / "escapes.py").write_text("import torch\nprint('\\d')")
    environ = ("env", "PYTHONWARNINGS=default")
    async with WithoutSettings(module, "--standalone", program, within=environ) as launcher:
        assert await launcher.code() == 0
    assert len([line for line in launcher.lines if "escapes.py" in line and "invalid escape" in line]) == 1
