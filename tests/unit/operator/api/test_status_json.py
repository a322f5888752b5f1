"""The JSON of the status."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.json_values import moment, rfc3339
from elastic_operator.api.status import Condition, JobState, JobStatus, LastFailure, status_from_json, status_to_json
from elastic_operator.errors import BadInput
from tests.support.any_job import STATUSES
from tests.support.builders import NOW
from torchelastic.protocol.records import DepartureReason, RunState, TimeBreakdown


@settings(database=None, derandomize=True)
@given(STATUSES)
def test_status_round_trips(status: JobStatus) -> None:
    assert status_from_json(json.loads(json.dumps(status_to_json(status)))) == status


def test_status_json() -> None:
    running = Condition(ConditionType.RUNNING, status=True, reason=Reason.TRAINING, message="round 1", since=NOW + 0.9)
    status = JobStatus(
        state=JobState.RUNNING, observed_generation=3, ready_replicas=1, desired=2, started=NOW, conditions=(running,)
    )
    document = status_to_json(status)

    assert document["state"] == "Running"
    assert document["readyDesired"] == "1/2"
    assert document["startTime"] == "2023-11-14T22:13:20Z"
    assert document["conditions"] == [
        {
            "type": "Running",
            "status": "True",
            "observedGeneration": 3,
            "lastTransitionTime": "2023-11-14T22:13:20Z",
            "reason": "Training",
            "message": "round 1",
        }
    ]
    optional = {
        "completionTime",
        "activeSince",
        "countedPodUIDs",
        "lastFailure",
        "excludedNodes",
        "appliedSpec",
        "timeBreakdown",
    }
    assert not optional & document.keys()


def test_times_of_a_breakdown_are_in_milliseconds_and_a_failure_omits_unknown_fields() -> None:
    split = TimeBreakdown(
        until=NOW + 90.25,
        state=RunState.STOPPING,
        seconds={RunState.TRAINING: 80.0, RunState.WAITING: 10.25},
        nodes_joined=3,
        departures={DepartureReason.NOT_NEEDED: 1},
    )
    killed = LastFailure("digits-1-x was killed by SIGKILL", pod="digits-1-x", signal="SIGKILL", time=NOW)
    document = status_to_json(JobStatus(time_breakdown=split, last_failure=killed))
    assert document["timeBreakdown"] == {
        "asOf": "2023-11-14T22:14:50.250Z",
        "seconds": {"waiting": 10.25, "training": 80.0},
        "nodesJoined": 3,
        "departures": {"not_needed": 1},
    }
    assert document["lastFailure"] == {
        "message": "digits-1-x was killed by SIGKILL",
        "pod": "digits-1-x",
        "signal": "SIGKILL",
        "time": "2023-11-14T22:13:20Z",
    }


@pytest.mark.parametrize("document", [None, {}, {"selector": "a=b", "somethingNew": 1}])
def test_missing_status_fields_have_defaults_and_unknown_ones_are_ignored(document: dict[str, object]) -> None:
    assert status_from_json(document) == JobStatus()


@pytest.mark.parametrize(
    "document",
    [
        {"podFailures": "many"},
        {"state": "Odd"},
        {"startTime": "yesterday"},
        {"lastFailure": "a text"},
        {"timeBreakdown": {"asOf": "2023-11-14T22:14:50Z", "seconds": {"dreaming": 1}}},
        {"timeBreakdown": {"asOf": "2023-11-14T22:14:50Z", "seconds": {"waiting": -1}}},
        {"appliedSpec": {"args": 7}},
        {"appliedSpec": {"etcd": 7}},
        {"appliedSpec": {"failurePolicy": {"rules": [{"action": "Odd"}]}}},
    ],
)
def test_foreign_status_is_rejected(document: dict[str, object]) -> None:
    with pytest.raises(BadInput, match="does not have the form that this operator writes"):
        status_from_json(document)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_times_are_clamped_to_the_calendar(seconds: float) -> None:
    assert moment(seconds) in ("1970-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z")
    assert rfc3339(seconds) in ("1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z")
