"""``elasticjob logs`` of a job on this machine."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_operator.client.local import select_files
from elastic_operator.errors import NotFound
from elastic_operator.local.log_files import LogReader, follow, log_files, tail_offset
from elastic_operator.views.log_selector import LogSelector

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def write(logs: Path, pod: str, round: int, rank: int, text: str, name: str = "output.log") -> Path:
    path = logs / pod / f"round_{round}" / f"rank_{rank}" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)
    return path


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """The logs of two pods that swapped their ranks in round 2."""
    write(tmp_path, "digits-0-aaaaa", 1, 0, "one\ntwo\n")
    write(tmp_path, "digits-1-bbbbb", 1, 1, "uno\n")
    write(tmp_path, "digits-1-bbbbb", 2, 0, "three\n")
    write(tmp_path, "digits-0-aaaaa", 2, 1, "tres\n")
    for pod in ("digits-0-aaaaa", "digits-1-bbbbb"):
        (tmp_path / pod / "agent.log").write_text(f"09:00:00 [{pod}] round 1\nTraceback\n")
    return tmp_path


def read(logs: Path, wanted: LogSelector, round: int | None = None, *, tail: int | None = None) -> str:
    output: list[bytes] = []
    reader = LogReader(output.append, label=not wanted.single_source, tail=tail)
    reader.read(select_files(logs, replace(wanted, round=round)))
    reader.finish()
    return b"".join(output).decode()


def test_the_selected_output_is_printed(logs: Path, tmp_path: Path) -> None:
    assert read(logs, LogSelector()) == "[rank 0] three\n[rank 1] tres\n"
    assert read(logs, LogSelector(0), 1) == "one\ntwo\n"
    write(logs, "digits-1-bbbbb", 2, 0, "10%\r20%\x1b[0m no newline")
    assert read(logs, LogSelector(0)) == "three\n10%\r20%\x1b[0m no newline"
    assert read(logs, LogSelector()) == "[rank 0] three\n[rank 1] tres\n[rank 0] 10%\r20%\x1b[0m no newline\n"
    write(logs, "digits-1-bbbbb", 3, 0, "alone\n")
    assert read(logs, LogSelector()) == "[rank 0] alone\n"
    assert read(logs, LogSelector(pod="digits-0-aaaaa")) == "[rank 1] tres\n", "the pod's last round"
    with pytest.raises(NotFound, match="no worker has started yet"):
        select_files(tmp_path / "none", LogSelector())


def test_agent_logs_are_labelled_with_the_pod(logs: Path) -> None:
    pod = "digits-0-aaaaa"
    assert read(logs, LogSelector(agents=True)).splitlines()[:2] == [f"09:00:00 [{pod}] round 1", f"[{pod}] Traceback"]
    assert read(logs, LogSelector(pod=pod, agents=True)) == f"09:00:00 [{pod}] round 1\nTraceback\n"


@pytest.mark.parametrize(
    ("wanted", "round", "sentence"),
    [
        (LogSelector(7), None, "there is no rank 7 in round 2; it has ranks 0-1"),
        (LogSelector(0), 9, "there is no log of round 9; there are logs of rounds 1-2"),
        (LogSelector(pod="x"), None, "there is no log of pod x; there are logs of digits-0-aaaaa, digits-1-bbbbb"),
    ],
)
def test_a_missing_log_is_reported_with_the_existing_ones(
    logs: Path, wanted: LogSelector, round: int | None, sentence: str
) -> None:
    with pytest.raises(NotFound) as error:
        select_files(logs, replace(wanted, round=round))
    assert str(error.value) == sentence


@pytest.mark.parametrize("name", ["round_x", "round_1_old"])
def test_other_folders_are_ignored(logs: Path, name: str) -> None:
    stray = logs / "digits-0-aaaaa" / name / "rank_0"
    stray.mkdir(parents=True)
    (stray / "output.log").write_text("stray\n")
    assert all("stray" not in file.path.read_text() for file in log_files(logs, LogSelector()))


@pytest.mark.parametrize(("text", "lines", "tail"), [
    ("a\nb\nc\n", 2, "b\nc\n"),
    ("a\nb\nc", 2, "b\nc"),
    ("a\nb\nc\n", 9, "a\nb\nc\n"),
    ("a\nb\nc\n", 0, ""),
    ("", 3, ""),
    ("\n\n\n", 2, "\n\n"),
    ("x" * 200_000 + "\n" + "y" * 70_000 + "\nz\n", 2, "y" * 70_000 + "\nz\n"),
])  # fmt: skip
def test_a_tail_is_the_last_lines_of_a_file(tmp_path: Path, text: str, lines: int, tail: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    assert path.read_text()[tail_offset(path, lines) :] == tail


class Following:
    """``logs -f`` in a thread, and its output."""

    def __init__(self, logs: Path, wanted: LogSelector, **how: Any) -> None:
        self.output = b""
        self.messages: list[str] = []
        self.ended = threading.Event()
        self._grown = threading.Condition()
        reader = LogReader(self._write, label=not wanted.single_source, tail=how.pop("tail", None))
        self._thread = threading.Thread(
            target=follow,
            args=(logs, wanted, reader),
            kwargs={"ended": self.ended, "tell": self.messages.append, **how},
        )
        self._thread.start()

    def _write(self, output: bytes) -> None:
        with self._grown:
            self.output += output
            self._grown.notify_all()

    def until(self, text: bytes) -> None:
        with self._grown:
            assert self._grown.wait_for(lambda: text in self.output, timeout=20), self.output

    def join(self) -> bytes:
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()
        return self.output


@pytest.fixture
def following(logs: Path) -> Iterator[Any]:
    started: list[Following] = []

    def start(wanted: LogSelector, **how: Any) -> Following:
        started.append(Following(logs, wanted, **how))
        return started[-1]

    yield start
    for each in started:
        each.ended.set()
        each.join()


def test_a_rank_is_followed_through_new_rounds(logs: Path, following: Any) -> None:
    followed = following(LogSelector(0))
    followed.until(b"three\n")
    write(logs, "digits-1-bbbbb", 2, 0, "four\n")
    followed.until(b"four\n")
    write(logs, "digits-2-ccccc", 3, 0, "five\n")
    followed.until(b"five\n")
    assert followed.messages == ["round 3 begins"]
    write(logs, "digits-2-ccccc", 3, 0, "last")
    followed.ended.set()
    assert followed.join() == b"three\nfour\nfive\nlast"


def test_following_starts_with_the_tail_and_prints_all_new_lines(logs: Path, following: Any) -> None:
    write(logs, "digits-1-bbbbb", 2, 0, "four\n")
    followed = following(LogSelector(0), tail=1)
    followed.until(b"four\n")
    write(logs, "digits-0-aaaaa", 3, 0, "five\nsix\n")
    followed.until(b"six\n")
    assert followed.output == b"four\nfive\nsix\n"


def test_following_one_round_ends_with_the_round(logs: Path, following: Any) -> None:
    followed = following(LogSelector(), only=2)
    followed.until(b"[rank 1] tres\n")
    write(logs, "digits-0-aaaaa", 3, 0, "five\n")
    assert followed.join() == b"[rank 0] three\n[rank 1] tres\n"


def test_following_can_start_before_the_first_log_exists(tmp_path: Path) -> None:
    followed = Following(tmp_path, LogSelector(1))
    write(tmp_path, "digits-0-aaaaa", 1, 1, "hello\n")
    followed.until(b"hello\n")
    followed.ended.set()
    assert followed.join() == b"hello\n"
    assert followed.messages == [], "the first round is not announced"
