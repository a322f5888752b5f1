"""The format of an agent's output: ranks before lines, and rounds in the log."""

from __future__ import annotations

import logging

import pytest

from torchelastic.protocol.log_format import (
    ROUND_LINE,
    STARTED,
    TIME_FORMAT,
    WORKER_LINE,
    log_format,
    rank_label,
    ranks_in_words,
    ranks_of,
    staying,
)


@pytest.mark.parametrize(
    ("role", "label"), [("default", "rank"), ("trainer", "trainer rank"), ("my role", "my role rank")]
)
def test_a_workers_line_starts_with_its_role_and_rank(role: str, label: str) -> None:
    assert rank_label(role) == label
    prefix = f"[{label} 12] "
    match = WORKER_LINE.match(f"{prefix}loss 0.3 [rank 7] ".encode())
    assert match is not None
    assert (int(match["rank"]), match.end()) == (12, len(prefix))


@pytest.mark.parametrize("node", ["digits-0-x4k2p", "100%s"])
@pytest.mark.parametrize(
    ("started", "stay", "words"),
    [
        ([3], [], "rank 3 of a world of 8"),
        ([4, 5], [], "ranks 4, 5 of a world of 8"),
        ([], [4, 5], "no rank of a world of 8; ranks 4, 5 stay"),
        ([5], [4], "rank 5 of a world of 8; rank 4 stays"),
    ],
)
def test_an_agent_logs_the_round_and_ranks_that_it_starts(
    node: str, started: list[int], stay: list[int], words: str
) -> None:
    values = (7, ranks_in_words(started), 8, staying(stay))
    record = logging.LogRecord("torchelastic", logging.INFO, "", 0, STARTED, values, None)
    line = logging.Formatter(log_format(node), TIME_FORMAT).format(record)
    assert line.endswith(f" [{node}] round 7: started {words}")
    match = ROUND_LINE.fullmatch(line.encode())
    assert match is not None
    assert int(match["round"]) == 7
    assert ranks_of(match) == sorted([*started, *stay])
    assert WORKER_LINE.match(line.encode()) is None
