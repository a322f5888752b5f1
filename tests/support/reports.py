"""Reports of jobs, to be shown."""

from __future__ import annotations

from typing import Any

from elastic_operator.model import JobState
from elastic_operator.report import Report
from torchelastic.contract import (
    EpochReason,
    FailureRecord,
    HistoryRecord,
    NodeEnd,
    OutcomeRecord,
    OutcomeState,
    PastEpoch,
    RunState,
    TimeSplit,
)

START = 1_700_000_000.0
"""When the job was made; 2023-11-14T22:13:20Z."""

TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 12, in <module>
    main()
RuntimeError: expected <script>alert("x")</script> & found a scalar"""


def killed(epoch: int, rank: int, **changes: Any) -> FailureRecord:
    """A worker that was killed."""
    about = {
        "local_rank": 0,
        "node": f"digits-{rank}-{'abcdefgh'[rank] * 5}.4f2a",
        "exit_code": -9,
        "pid": 4711,
        "message": "killed by SIGKILL",
    }
    return FailureRecord(epoch=epoch, rank=rank, **about | changes)


def report(**changes: Any) -> Report:
    """A job of two pods that was scaled, lost a worker and a pod, and succeeded after 100 seconds."""
    resized, failed, lost = EpochReason.RESIZED, EpochReason.WORKER_FAILED, EpochReason.NODE_LOST
    epochs = (
        PastEpoch(1, START + 5, 2, 2, EpochReason.NODE_JOINED, "2 nodes are there"),
        PastEpoch(2, START + 25, 3, 3, resized, "scaled from 2 to 3 pods", lost=0.0),
        PastEpoch(3, START + 45, 3, 3, failed, "rank 1 was killed by SIGKILL", killed(2, 1), lost=4.0),
        PastEpoch(4, START + 65, 2, 2, lost, "digits-2-ccccc is gone: its connection broke", lost=1.5),
        PastEpoch(5, START + 70, 3, 3, EpochReason.NODE_JOINED, "digits-2-ddddd has come", lost=0.5),
    )
    split = TimeSplit(
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
        joined=4,
        gone={NodeEnd.DIED: 1},
    )
    whole = {
        "namespace": "team",
        "name": "digits",
        "uid": "0f4c",
        "created": START,
        "state": JobState.SUCCEEDED,
        "completed": START + 100,
        "split": split,
        "history": HistoryRecord(created=START, epochs=epochs),
        "outcome": OutcomeRecord(state=OutcomeState.SUCCEEDED, epoch=5, restarts=1),
    }
    return Report(**whole | changes)


def failed(**changes: Any) -> Report:
    """The same job, which failed of its program in the end."""
    failure = killed(5, 0, exit_code=1, message=TRACEBACK)
    message = "rank 0 on digits-0-aaaaa failed: RuntimeError: expected <script>…</script>"
    outcome = OutcomeRecord(state=OutcomeState.FAILED, epoch=5, restarts=2, message=message, failure=failure)
    return report(**{"state": JobState.FAILED, "message": message, "outcome": outcome} | changes)


def long(epochs: int = 200, omitted: int = 1800) -> Report:
    """A job that went through so many epochs in a day that those in the middle are not kept."""
    span = 86_400 / (epochs + 60)
    past = []
    for position in range(epochs):
        late = position >= epochs // 2
        number = position + 1 + (omitted if late else 0)
        began = START + 60 + position * span + (60 * span if late else 0)
        reason = EpochReason.WORKER_FAILED if position % 7 == 3 else EpochReason.RESIZED
        failure = killed(number - 1, 1) if reason is EpochReason.WORKER_FAILED else None
        cause = f"scaled to {2 + position % 5} pods"
        past.append(PastEpoch(number, began, 2 + position % 5, 8 * (2 + position % 5), reason, cause, failure, 12.0))
    history = HistoryRecord(created=START, epochs=tuple(past), omitted=omitted)
    seconds = {RunState.TRAINING: 80_000.0, RunState.STARTING: 5000.0, RunState.WAITING: 1400.0}
    split = TimeSplit(until=START + 86_400, seconds=seconds, joined=9)
    return report(history=history, split=split, completed=START + 86_400)
