"""The message and the kind of a worker's failure, from its exit code, its error file and its output."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from torchelastic.agent.failures import MESSAGE_LIMIT, explain
from torchelastic.agent.workers.processes import MemoryKills
from torchelastic.protocol.records import FailureKind
from torchelastic.protocol.worker import ERROR_FILE
from torchelastic.training.errors import record_exception

if TYPE_CHECKING:
    from pathlib import Path

TRACE = """Traceback (most recent call last):
  File "/home/me/train.py", line 12, in <module>
    step()
  File "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1751, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
"""


@pytest.fixture
def error_json(tmp_path: Path) -> Path:
    return tmp_path / "error.json"


def words(error_json: Path, exit_code: int, tail: str = "", *, memory: bool = False) -> str:
    return explain(exit_code, error_file=error_json, tail=tail, out_of_memory=memory).message


def record(message: str, trace: str = "") -> str:
    return json.dumps({"message": {"message": message, "extraInfo": {"py_callstack": trace, "timestamp": "0"}}})


@pytest.mark.parametrize("libraries", ["/venv/lib/python3.12/site-packages", "/opt/pytorch"])
def test_an_exception_is_reported_with_the_innermost_line_of_the_program(error_json: Path, libraries: str) -> None:
    trace = TRACE.replace("/venv/lib/python3.12/site-packages", libraries)
    error_json.write_text(record("RuntimeError: sizes differ", trace))
    assert words(error_json, 1) == "RuntimeError: sizes differ (train.py:12)"


@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
def test_without_an_error_file_the_printed_traceback_is_used(error_json: Path, prefix: str) -> None:
    lines = f"round 3\n{TRACE}ValueError: bad input".splitlines()
    tail = "".join(f"{prefix}{line}\n" for line in lines)
    assert words(error_json, 1, f"{tail}late line of a thread\n") == "ValueError: bad input (train.py:12)"


@pytest.mark.parametrize(
    ("exit_code", "tail", "expected"),
    [
        (3, "", "exit code 3"),
        (3, "loading\n\nno such data set\n", "exit code 3; it last printed: loading | no such data set"),
        (-9, "whatever", "killed by SIGKILL"),
        (-11, "loading\nFatal Python error: Segmentation fault", "killed by SIGSEGV: Segmentation fault"),
        (-6, "python: malloc.c:2599: corrupted top size", "killed by SIGABRT; it last printed: python: malloc.c:2599"),
        (-63, "", "killed by signal 63"),
    ],
)
def test_without_an_exception_the_exit_code_or_signal_is_reported(
    error_json: Path, exit_code: int, tail: str, expected: str
) -> None:
    assert words(error_json, exit_code, tail).startswith(expected)


@pytest.mark.parametrize(("exit_code", "kind"), [(1, "unknown"), (-6, "unknown"), (-9, "program"), (-15, "program")])
def test_a_crash_without_captured_output_has_an_unknown_cause(error_json: Path, exit_code: int, kind: str) -> None:
    assert explain(exit_code, error_file=error_json, tail="", out_of_memory=False).kind.value == kind


@pytest.mark.parametrize(
    "text",
    [
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error",
        "DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500).",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4711",
        "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)",
        "DistStoreError: wait timeout after 2000ms, keys: /default_pg/0//cpu//0/1",
        "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:123] Application timeout caused pair closure",
        "RuntimeError: NCCL communicator was aborted on rank 1.",
    ],
)
def test_an_error_of_a_collective_is_a_communication_failure(error_json: Path, text: str) -> None:
    error_json.write_text(record(text))
    assert explain(1, error_file=error_json, tail="", out_of_memory=False).kind is FailureKind.COMMUNICATION
    error_json.unlink()
    assert explain(-6, error_file=error_json, tail=text, out_of_memory=False).kind is FailureKind.COMMUNICATION


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: bad input",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "DistBackendError: Process group watchdog thread terminated with exception: CUDA error: device-side assert",
        "DistBackendError: NCCL error, ncclUnhandledCudaError: Call failed. Last error: Cuda failure 2 'out of memory'",
    ],
)
def test_an_error_of_the_program_is_a_program_failure(error_json: Path, text: str) -> None:
    unrelated = "[Gloo] Rank 0 is connected to 1 peer ranks.\nloading\nthe data server: timeout\n"
    assert explain(3, error_file=error_json, tail=unrelated + text, out_of_memory=False).kind is FailureKind.PROGRAM
    error_json.write_text(record(text))
    assert explain(1, error_file=error_json, tail="", out_of_memory=False).kind is FailureKind.PROGRAM


DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
PROGRAM_FIRST = f"""{TRACE}ValueError: bad input
{DURING}{TRACE.replace("12", "20")}RuntimeError: [gloo/pair.cc:5] Connection closed by peer
"""


@pytest.mark.parametrize("recorded", [True, False])
def test_a_later_collective_error_does_not_hide_the_program_failure(error_json: Path, recorded: bool) -> None:
    tail = f"round 3\n{PROGRAM_FIRST}"
    if recorded:
        error_json.write_text(record(PROGRAM_FIRST.splitlines()[-1], PROGRAM_FIRST))
        tail = ""
    cause = explain(1, error_file=error_json, tail=tail, out_of_memory=False)
    assert (cause.kind, cause.message) == (FailureKind.PROGRAM, "ValueError: bad input (train.py:12)")


def test_the_last_of_chained_program_exceptions_is_reported(error_json: Path) -> None:
    tail = f"{TRACE}KeyError: 'lr'\n{DURING}{TRACE.replace('12', '20')}ConfigError: lr is missing\n"
    assert words(error_json, 1, tail) == "ConfigError: lr is missing (train.py:20)"


NCCL_ABORT = """[rank1]:[E1122 10:00:00 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 Rank 1] Process group watchdog thread terminated with exception: Watchdog caught collective
Exception raised from checkTimeout at ProcessGroupNCCL.cpp:618 (most recent call first):
frame #0: c10::Error::Error(...) + 0x96 (0x7f in libc10.so)
frame #1: <unknown function> + 0x94ac3
"""

FAULT = """Fatal Python error: Aborted

Current thread 0x00007f (most recent call first):
  File "/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 2500 in all_reduce
  File "/home/me/train.py", line 12 in main
  File "/home/me/train.py", line 20 in <module>
"""


def test_a_crash_is_reported_with_its_last_message_and_line(error_json: Path) -> None:
    aborted = explain(-6, error_file=error_json, tail=NCCL_ABORT, out_of_memory=False)
    assert aborted.kind is FailureKind.COMMUNICATION
    assert aborted.message.startswith("killed by SIGABRT: DistBackendError: [PG ID 0 Rank 1] Process group watchdog")
    assert words(error_json, -6, NCCL_ABORT + FAULT).endswith("Watchdog caught collective (train.py:12)")
    assert words(error_json, -6, FAULT) == "killed by SIGABRT: Aborted (train.py:12)"


@pytest.mark.parametrize("extra", ["null", "[]", '{"py_callstack": 3}', '{"py_callstack": "File x, line x"}'])
def test_invalid_details_in_an_error_file_do_not_hide_the_message(error_json: Path, extra: str) -> None:
    error_json.write_text(f'{{"message": {{"message": "ValueError: x", "extraInfo": {extra}}}}}')
    assert words(error_json, 1) == "ValueError: x"


@pytest.mark.parametrize(
    "content",
    [
        '{"message": {"message": ["x"]}}',
        '{"message": {}}',
        "[3]",
        "[" * 100_000,
        "\0\udcff",
        '{"message": {"message": "' + "x" * 300_000 + '"}}',
    ],
    ids=range(6),
)
def test_an_invalid_error_file_is_ignored(error_json: Path, content: str) -> None:
    error_json.write_text(content, errors="surrogateescape")
    assert words(error_json, 5) == "exit code 5"


def test_a_long_exception_is_shortened(error_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE, str(error_json))
    record_exception(ValueError("x" * 10_000_000))
    assert error_json.stat().st_size < 64 << 10
    message = words(error_json, 1)
    assert message.startswith("ValueError: xxx")
    assert len(message) <= MESSAGE_LIMIT


def test_an_exception_replaces_the_record_of_another_process(error_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE, str(error_json))
    error_json.write_text(record("RuntimeError: of a nested launcher"))
    record_exception(ValueError("the reason"))
    assert words(error_json, 1) == "ValueError: the reason"
    assert [path.name for path in error_json.parent.iterdir()] == ["error.json"]


def test_a_message_with_invalid_unicode_is_kept(error_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE, str(error_json))
    record_exception(ValueError("no file \udcff"))
    assert words(error_json, 1) == "ValueError: no file \udcff"


# -- out-of-memory kills


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/memory.events": "max 7\noom 3\noom_kill 2\n"}, 2),
        ({"proc/self/cgroup": "0::/../outer\n", "sys/fs/cgroup/memory.events": "oom_kill 2\n"}, 2),
        (
            {
                "proc/self/cgroup": "9:cpu,memory:/docker/1\n0::/\n",
                "sys/fs/cgroup/memory/docker/1/memory.oom_control": "oom_kill_disable 0\noom_kill 2\n",
            },
            2,
        ),
        ({}, 70),
    ],
)
def test_oom_kills_are_counted_in_the_agents_cgroup_or_else_on_the_machine(
    files: dict[str, str], count: int, tmp_path: Path
) -> None:
    for name, content in {"proc/vmstat": "pgfault 9\noom_kill 70\n", **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert MemoryKills(tmp_path).count() == count
