"""The JSON of a job's report."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from elastic_operator.api.status import JobState, Report, decode_report, encode_report, merged
from elastic_operator.errors import BadInput
from tests.support.builders import NAME, NOW, UID, a_failure
from torchelastic.protocol.records import (
    HISTORY_LIMIT,
    HistoryRecord,
    OutcomeRecord,
    OutcomeState,
    PastRound,
    RoundReason,
    RunState,
    TimeBreakdown,
)


def a_report(*numbers: int, **fields: Any) -> Report:
    rounds = tuple(PastRound(number=number, began=NOW + number, nodes=2, workers=4) for number in numbers)
    history = HistoryRecord(created=NOW, rounds=rounds)
    known = {"namespace": "team", "name": NAME, "uid": UID, "created": NOW, "state": JobState.SUCCEEDED}
    return Report(**{**known, "history": history, **fields})


def numbers_of(report: Report) -> list[int]:
    return [round.number for round in report.history.rounds]


def test_report_json() -> None:
    failure = a_failure(host="10.0.0.7", pid=41, uptime=2.5)
    last = PastRound(
        number=2,
        began=NOW + 9.5,
        nodes=2,
        workers=4,
        reason=RoundReason.WORKER_FAILED,
        cause="rank 3 failed",
        failure=failure,
        lost=1.25,
        staying=3,
        first_steps=(0, 120),
    )
    report = a_report(1)
    report = replace(
        report,
        completed_at=NOW + 20,
        suspensions=(NOW + 5.25,),
        history=HistoryRecord(created=NOW, rounds=(*report.history.rounds, last)),
        time_breakdown=TimeBreakdown(until=NOW + 20, seconds={RunState.TRAINING: 20.0}, lost=1.25, nodes_joined=2),
        outcome=OutcomeRecord(state=OutcomeState.SUCCEEDED, round=2, restarts=1),
    )
    assert decode_report(encode_report(report)) == report
    assert json.loads(encode_report(report)) == {
        "job": {
            "namespace": "team",
            "name": NAME,
            "uid": UID,
            "created": "2023-11-14T22:13:20.000Z",
            "completed": "2023-11-14T22:13:40.000Z",
            "state": "Succeeded",
            "message": "",
        },
        "timeBreakdown": {
            "asOf": "2023-11-14T22:13:40.000Z",
            "seconds": {"training": 20.0},
            "lostSeconds": 1.25,
            "nodesJoined": 2,
            "departures": {},
        },
        "rounds": [
            {
                "number": 1,
                "began": "2023-11-14T22:13:21.000Z",
                "nodes": 2,
                "workers": 4,
                "reason": "node_joined",
                "cause": "",
                "staying": 0,
                "firstSteps": [],
            },
            {
                "number": 2,
                "began": "2023-11-14T22:13:29.500Z",
                "nodes": 2,
                "workers": 4,
                "reason": "worker_failed",
                "cause": "rank 3 failed",
                "failure": {
                    "round": 1,
                    "rank": 3,
                    "localRank": 1,
                    "node": "digits-1-abcde.7f",
                    "host": "10.0.0.7",
                    "pid": 41,
                    "exitCode": 1,
                    "kind": "program",
                    "message": "ValueError: no",
                    "uptime": 2.5,
                    "nonRetryable": False,
                    "uncharged": False,
                },
                "lostSeconds": 1.25,
                "staying": 3,
                "firstSteps": [0, 120],
            },
        ],
        "omitted": 0,
        "suspensions": ["2023-11-14T22:13:25.250Z"],
        "outcome": {"state": "succeeded", "round": 2, "restarts": 1, "message": ""},
    }


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"job": {"name": "a", "state": "Odd"}}',
        b'{"job": {"name": "a", "created": "yesterday"}}',
        b'{"job": {"name": "a"}, "rounds": [{"number": 1, "began": "0001-01-01T00:00:00Z"}]}',
        b'{"job": {"name": "a"}, "outcome": {"state": "maybe"}}',
        b'{"job": {"name": "a"}, "timeBreakdown": {"asOf": "2023-11-14T22:13:40Z", "seconds": {"waiting": -1}}}',
        b"[" * 100_000,
    ],
)
def test_invalid_report_is_rejected(text: bytes) -> None:
    with pytest.raises(BadInput, match="not the report of a job: "):
        decode_report(text)


def test_unknown_fields_of_a_report_are_ignored() -> None:
    document = {**json.loads(encode_report(a_report(1))), "later": 1}
    assert decode_report(json.dumps(document)) == a_report(1)


@pytest.mark.parametrize("letter", ["x", "\n", "ü", "\U0001f525", "\udcff"])
def test_long_report_is_shortened_to_the_limit(letter: str) -> None:
    words = letter * 16000
    failure = a_failure(message=words)
    rounds = tuple(
        PastRound(number=number, began=NOW, cause=words, failure=failure) for number in range(1, HISTORY_LIMIT + 1)
    )
    report = replace(a_report(), message=words, history=HistoryRecord(created=NOW, rounds=rounds))
    text = encode_report(report)
    assert len(text) <= 900_000
    kept = decode_report(text)
    assert numbers_of(kept) == list(range(1, HISTORY_LIMIT + 1))
    assert "…" in kept.message


# -- over suspensions


def test_rounds_after_a_resumption_are_added() -> None:
    kept = a_report(1, 2, 3, state=JobState.SUSPENDED, time_breakdown=TimeBreakdown(until=NOW + 5))
    later = merged(kept, a_report(4, 5))
    assert (numbers_of(later), later.history.omitted, later.state) == ([1, 2, 3, 4, 5], 0, JobState.SUCCEEDED)
    assert later.time_breakdown == kept.time_breakdown, "the time breakdown is kept if there is no later one"
    assert numbers_of(merged(kept, a_report())) == [1, 2, 3]


def test_each_suspension_is_kept_once() -> None:
    first = a_report(1, state=JobState.SUSPENDED, suspensions=(NOW + 1.5,))
    second = merged(first, a_report(2, state=JobState.SUSPENDED, suspensions=(NOW + 2.5,)))
    assert second.suspensions == (NOW + 1.5, NOW + 2.5)
    written = decode_report(encode_report(second))
    assert merged(written, second).suspensions == merged(written, a_report(2, 3)).suspensions == second.suspensions


def test_omitted_rounds_are_counted_once() -> None:
    kept = merged(None, a_report(1, 2, 9, 10))
    later = merged(kept, a_report(11, 15))
    assert (numbers_of(later), later.history.omitted) == ([1, 2, 9, 10, 11, 15], 9)
    assert merged(later, a_report(11, 15)) == later


def test_first_and_last_rounds_are_kept() -> None:
    later = merged(a_report(*range(1, 151)), a_report(*range(151, 301)))
    half = HISTORY_LIMIT // 2
    assert numbers_of(later) == [*range(1, half + 1), *range(301 - half, 301)]
    assert later.history.omitted == 300 - HISTORY_LIMIT


def test_report_of_another_job_is_not_merged() -> None:
    assert numbers_of(merged(a_report(1, 2, uid="another"), a_report(1))) == [1]
