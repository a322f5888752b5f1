"""Why a worker ended is said in words, from what it left behind, which is not trusted."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from torchelastic.agent import error_file
from torchelastic.agent.failure import MESSAGE_LIMIT, explain, read_error_file
from torchelastic.contract import FailureKind

if TYPE_CHECKING:
    from pathlib import Path

TRACE = """Traceback (most recent call last):
  File "/home/me/train.py", line 12, in <module>
    step()
  File "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1751, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
"""


@pytest.fixture
def told(tmp_path: Path) -> Path:
    return tmp_path / "error.json"


def words(told: Path, exit_code: int, tail: str = "", *, memory: bool = False) -> str:
    return explain(exit_code, error_file=told, tail=tail, memory=memory).message


def record(message: str, trace: str = "") -> str:
    return json.dumps({"message": {"message": message, "extraInfo": {"py_callstack": trace, "timestamp": "0"}}})


def test_an_exception_is_told_with_the_last_place_in_the_users_own_code(told: Path) -> None:
    told.write_text(record("RuntimeError: sizes differ", TRACE))
    assert words(told, 1) == "RuntimeError: sizes differ (train.py:12)"


def test_an_exception_inside_libraries_alone_is_told_with_the_last_place_in_them(told: Path) -> None:
    told.write_text(record("KeyError: 'x'", "\n".join(TRACE.splitlines()[3:])))
    assert words(told, 1) == "KeyError: 'x' (module.py:1751)"


def test_a_traceback_at_the_end_of_the_output_serves_where_there_is_no_file(told: Path) -> None:
    tail = f"epoch 3\n{TRACE}ValueError: bad input\nlate line of a thread\n"
    assert words(told, 1, tail) == "ValueError: bad input (train.py:12)"


def test_torchs_prefix_of_the_rank_is_no_part_of_the_exception(told: Path) -> None:
    tail = "".join(f"[rank3]: {line}\n" for line in f"{TRACE}ValueError: bad input".splitlines())
    assert words(told, 1, tail) == "ValueError: bad input (train.py:12)"


@pytest.mark.parametrize(
    ("exit_code", "tail", "expected"),
    [
        (3, "", "exit code 3"),
        (3, "loading\n\nno such data set\n", "exit code 3; it last printed: loading | no such data set"),
        (-9, "whatever", "killed by SIGKILL"),
        (-15, "whatever", "killed by SIGTERM"),
        (-11, "Fatal Python error: Segmentation fault", "killed by SIGSEGV; it last printed: Fatal Python error: Segm"),
        (-63, "", "killed by signal 63"),
    ],
)
def test_an_end_without_an_exception_is_told_by_its_code_or_signal(
    told: Path, exit_code: int, tail: str, expected: str
) -> None:
    assert words(told, exit_code, tail).startswith(expected)


def test_a_kill_for_memory_is_named_as_that(told: Path) -> None:
    assert words(told, -9, memory=True) == "killed by SIGKILL: out of memory"
    assert "memory" not in words(told, -15, memory=True)


@pytest.mark.parametrize(
    "text",
    [
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error",
        "DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500).",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4711",
        "RuntimeError: [gloo/transport/tcp/buffer.cc:72] Timed out waiting 1800000ms for send operation to complete",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [10.0.0.2]: Broken pipe",
        "RuntimeError: Connection reset by peer",
        "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)",
    ],
)
def test_what_a_broken_collective_raises_is_a_failure_of_communication(told: Path, text: str) -> None:
    told.write_text(record(text))
    assert explain(1, error_file=told, tail="", memory=False).kind is FailureKind.COMMUNICATION
    told.unlink()
    assert explain(-6, error_file=told, tail=text, memory=False).kind is FailureKind.COMMUNICATION


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: bad input",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "TimeoutError: the data server did not answer",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_what_the_program_itself_raises_is_a_failure_of_the_program(told: Path, text: str) -> None:
    told.write_text(record(text))
    assert explain(1, error_file=told, tail="", memory=False).kind is FailureKind.PROGRAM


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        "null",
        '{"message": 7}',
        '{"message": {"message": ["x"]}}',
        '{"message": {}}',
        "[" * 100_000,
        "\0\udcff",
        '{"message": {"message": "' + "x" * 300_000 + '"}}',
    ],
    ids=range(10),
)
def test_a_file_that_is_no_such_record_is_as_none(told: Path, content: str) -> None:
    told.write_text(content, errors="surrogateescape")
    assert read_error_file(told) == ""
    assert words(told, 5) == "exit code 5"


@pytest.mark.parametrize("extra", [None, [], {"py_callstack": 3}, {"py_callstack": 'File "a", line x'}])
def test_a_record_with_odd_details_still_tells_its_message(told: Path, extra: Any) -> None:
    told.write_text(json.dumps({"message": {"message": "ValueError: x", "extraInfo": extra}}))
    assert words(told, 1) == "ValueError: x"


def test_neither_links_nor_pipes_are_opened_in_place_of_the_file(told: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(record("secret"))
    told.symlink_to(secret)
    assert read_error_file(told) == ""
    told.unlink()
    os.mkfifo(told)
    assert read_error_file(told) == ""


def test_a_message_is_bounded_however_long_the_exception(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(error_file.VARIABLE, str(told))
    error_file.write(ValueError("x" * 10_000_000))
    assert told.stat().st_size < 64 << 10
    message = words(told, 1)
    assert message.startswith("ValueError: xxx")
    assert len(message) <= MESSAGE_LIMIT


def test_the_first_exception_that_is_told_stays(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(error_file.VARIABLE, str(told))
    error_file.write(ValueError("the reason"))
    error_file.write(RuntimeError("what came of it"))
    assert words(told, 1) == "ValueError: the reason"
    assert [path.name for path in told.parent.iterdir()] == ["error.json"]


def test_an_exception_without_a_text_is_told_by_its_name(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(error_file.VARIABLE, str(told))
    error_file.write(AssertionError())
    assert words(told, 1) == "AssertionError"
