"""Reports of jobs that have finished."""

from __future__ import annotations

from typing import Any

from elastic_operator.api.status import JobState, Report
from tests.support.cluster_objects import START
from torchelastic.protocol.records import (
    DepartureReason,
    FailureRecord,
    HistoryRecord,
    OutcomeRecord,
    OutcomeState,
    PastRound,
    RoundReason,
    RunState,
    TimeBreakdown,
)

TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 12, in <module>
    main()
RuntimeError: expected <script>alert("x")</script> & found a scalar"""


def killed(round: int, rank: int, **changes: Any) -> FailureRecord:
    """Return the failure of a worker that was killed."""
    about = {
        "local_rank": 0,
        "node": f"digits-{rank}-{'abcdefgh'[rank] * 5}.4f2a",
        "exit_code": -9,
        "pid": 4711,
        "message": "killed by SIGKILL",
    }
    return FailureRecord(round=round, rank=rank, **about | changes)


def report(**changes: Any) -> Report:
    """Return the report of a job that was scaled, lost a worker and a pod, and succeeded after 100 seconds."""
    resized, failed, lost = RoundReason.RESIZED, RoundReason.WORKER_FAILED, RoundReason.NODE_LOST
    rounds = (
        PastRound(1, START + 5, 2, 2, RoundReason.NODE_JOINED, "2 nodes are there"),
        PastRound(2, START + 25, 3, 3, resized, "scaled from 2 to 3 pods", lost=0.0),
        PastRound(3, START + 45, 3, 3, failed, "rank 1 was killed by SIGKILL", killed(2, 1), lost=4.0),
        PastRound(4, START + 65, 2, 2, lost, "digits-2-ccccc is gone: its connection broke", lost=1.5),
        PastRound(5, START + 70, 3, 3, RoundReason.NODE_JOINED, "digits-2-ddddd has come", lost=0.5),
    )
    split = TimeBreakdown(
        until=START + 100,
        state=RunState.STOPPING,
        seconds={
            RunState.WAITING: 4.0,
            RunState.RENDEZVOUS: 2.0,
            RunState.STARTING: 6.0,
            RunState.RESTORING: 3.0,
            RunState.TRAINING: 84.0,
            RunState.STOPPING: 1.0,
        },
        lost=6.0,
        nodes_joined=4,
        departures={DepartureReason.DIED: 1},
    )
    whole = {
        "namespace": "team",
        "name": "digits",
        "uid": "0f4c",
        "created": START,
        "state": JobState.SUCCEEDED,
        "completed_at": START + 100,
        "time_breakdown": split,
        "history": HistoryRecord(created=START, rounds=rounds),
        "outcome": OutcomeRecord(state=OutcomeState.SUCCEEDED, round=5, restarts=1),
    }
    return Report(**whole | changes)


def failed(**changes: Any) -> Report:
    """Return the report of the same job for the case that it failed in the end because of its program."""
    failure = killed(5, 0, exit_code=1, message=TRACEBACK)
    message = "rank 0 on digits-0-aaaaa failed: RuntimeError: expected <script>…</script>"
    outcome = OutcomeRecord(state=OutcomeState.FAILED, round=5, restarts=2, message=message, failure=failure)
    return report(**{"state": JobState.FAILED, "message": message, "outcome": outcome} | changes)


def long(rounds: int = 200, omitted: int = 1800) -> Report:
    """Return the report of a job with many rounds in a day; the rounds in the middle are omitted."""
    span = 86_400 / (rounds + 60)
    past = []
    for position in range(rounds):
        late = position >= rounds // 2
        number = position + 1 + (omitted if late else 0)
        began = START + 60 + position * span + (60 * span if late else 0)
        reason = RoundReason.WORKER_FAILED if position % 7 == 3 else RoundReason.RESIZED
        failure = killed(number - 1, 1) if reason is RoundReason.WORKER_FAILED else None
        cause = f"scaled to {2 + position % 5} pods"
        past.append(PastRound(number, began, 2 + position % 5, 8 * (2 + position % 5), reason, cause, failure, 12.0))
    history = HistoryRecord(created=START, rounds=tuple(past))
    seconds = {RunState.TRAINING: 80_000.0, RunState.STARTING: 5000.0, RunState.WAITING: 1400.0}
    split = TimeBreakdown(until=START + 86_400, seconds=seconds, nodes_joined=9)
    return report(history=history, time_breakdown=split, completed_at=START + 86_400)
