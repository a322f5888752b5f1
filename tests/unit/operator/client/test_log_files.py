"""``elasticjob logs`` of a job on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from elastic_operator.client import LogSelector
from elastic_operator.client.local import follow_logs, print_logs
from elastic_operator.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable
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


def read(logs: Path, **selector: Any) -> str:
    output: list[bytes] = []
    print_logs(logs, LogSelector(**selector), output.append)
    return b"".join(output).decode()


def test_the_selected_output_is_printed(logs: Path, tmp_path: Path) -> None:
    assert read(logs) == "[rank 0] three\n[rank 1] tres\n"
    assert read(logs, rank=0, round=1) == "one\ntwo\n"
    write(logs, "digits-1-bbbbb", 2, 0, "10%\r20%\x1b[0m no newline")
    assert read(logs, rank=0) == "three\n10%\r20%\x1b[0m no newline"
    assert read(logs) == "[rank 0] three\n[rank 0] 10%\r[rank 0] 20%\x1b[0m no newline\n[rank 1] tres\n"
    write(logs, "digits-1-bbbbb", 3, 0, "alone\n")
    write(logs, "digits-1-bbbbb/round_9_old", 9, 0, "stray\n")
    assert read(logs) == "[rank 0] alone\n"
    assert read(logs, pod="digits-0-aaaaa") == "[rank 1] tres\n", "the pod's last round"
    with pytest.raises(NotFound, match="no worker has started yet"):
        read(tmp_path / "none")


def test_agent_logs_are_labeled_with_the_pod(logs: Path) -> None:
    pod = "digits-0-aaaaa"
    assert read(logs, agents=True).splitlines()[:2] == [f"09:00:00 [{pod}] round 1", f"[{pod}] Traceback"]
    assert read(logs, pod=pod, agents=True) == f"09:00:00 [{pod}] round 1\nTraceback\n"


@pytest.mark.parametrize(
    ("selector", "sentence"),
    [
        ({"rank": 7}, "there is no rank 7 in round 2; it has ranks 0-1"),
        ({"rank": 0, "round": 9}, "there is no log of round 9; there are logs of rounds 1-2"),
        ({"pod": "x"}, "there is no log of pod x; there are logs of digits-0-aaaaa, digits-1-bbbbb"),
    ],
)
def test_a_missing_log_is_reported_with_the_existing_ones(logs: Path, selector: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NotFound) as error:
        read(logs, **selector)
    assert str(error.value) == sentence


@pytest.mark.parametrize(("text", "lines", "tail"), [
    ("a\nb\nc\n", 2, "b\nc\n"),
    ("a\nb\nc", 2, "b\nc"),
    ("a\nb\nc\n", 9, "a\nb\nc\n"),
    ("a\nb\nc\n", 0, ""),
    ("", 3, ""),
    ("\n\n\n", 2, "\n\n"),
])  # fmt: skip
def test_a_tail_is_the_last_lines_of_a_file(tmp_path: Path, text: str, lines: int, tail: str) -> None:
    write(tmp_path, "digits-0-aaaaa", 1, 0, text)
    assert read(tmp_path, rank=0, tail=lines) == tail


def follow(logs: Path, *changes: Callable[[], object], **selector: Any) -> tuple[str, list[str]]:
    """Return the output and messages of ``logs -f`` if each change precedes one poll and the run then ends."""
    left, output, messages = [*changes], [], []

    def alive() -> bool:
        if left:
            left.pop(0)()
            return True
        return False

    follow_logs(logs, LogSelector(**selector), output.append, alive=alive, notify=messages.append)
    return b"".join(output).decode(), messages


def test_a_rank_is_followed_through_new_rounds(logs: Path) -> None:
    changes = (
        lambda: write(logs, "digits-1-bbbbb", 2, 0, "four\n"),
        lambda: write(logs, "digits-2-ccccc", 3, 0, "five\n"),
        lambda: write(logs, "digits-2-ccccc", 3, 0, "last"),
    )
    assert follow(logs, *changes, rank=0, tail=2) == ("three\nfour\nfive\nlast", ["round 3 begins"])


def test_unfinished_lines_are_followed_and_lines_of_ranks_do_not_mix(tmp_path: Path) -> None:
    changes = [
        lambda rank=rank, text=text: write(tmp_path, "digits-0-aaaaa", 1, rank, text)
        for rank, text in ((0, "10%"), (0, "\r20%"), (1, "uno\n"), (0, "\r30%\nlast\nend"))
    ]
    expected = "[rank 0] 10%\r[rank 0] 20%\n[rank 1] uno\n[rank 0] \r[rank 0] 30%\n[rank 0] last\n[rank 0] end\n"
    assert follow(tmp_path, *changes) == (expected, [])


def test_following_one_round_ends_with_the_round(logs: Path) -> None:
    def forever() -> None:
        write(logs, "digits-0-aaaaa", 3, 0, "five\n")

    assert follow(logs, *[forever] * 9, round=2) == ("[rank 0] three\n[rank 1] tres\n", [])


def test_following_can_start_before_the_first_log_exists(tmp_path: Path) -> None:
    assert follow(tmp_path, lambda: write(tmp_path, "digits-0-aaaaa", 1, 1, "hello\n"), rank=1) == ("hello\n", [])
