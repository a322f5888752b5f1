"""The Event objects of jobs and of deleted pods."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator.api.constants import EventReason
from elastic_operator.controller.model import JobEvent
from elastic_operator.kubernetes.backend import deleted_pod_event
from elastic_operator.kubernetes.writer import event_object
from tests.support import cluster_objects
from tests.support.cluster_objects import START, at, died
from torchelastic.protocol import TerminationMessage, encode_termination_message

NEWS = JobEvent(EventReason.SCALED, "scaled from 2 to 3 pods")


def a_job(version: str = "7") -> dict[str, Any]:
    job = cluster_objects.job()
    job["metadata"]["resourceVersion"] = version
    return job


def test_an_event_names_its_job_and_its_reporter() -> None:
    event = event_object(a_job(), NEWS, identity="operator-0", now=START + 3)

    assert event["metadata"]["namespace"] == cluster_objects.NAMESPACE
    assert event["metadata"]["name"].startswith("digits.")
    assert event["involvedObject"] == {
        "apiVersion": "elastic.pytorch.org/v1alpha1",
        "kind": "ElasticJob",
        "name": "digits",
        "namespace": cluster_objects.NAMESPACE,
        "uid": cluster_objects.JOB_UID,
        "resourceVersion": "7",
    }
    assert (event["type"], event["reason"], event["message"]) == ("Normal", "Scaled", "scaled from 2 to 3 pods")
    assert event["firstTimestamp"] == event["lastTimestamp"] == at(3)
    assert event["reportingInstance"] == "operator-0"
    long = event_object(a_job(), JobEvent(EventReason.POD_DIED, "x" * 5000, warning=True), identity="x", now=START)
    assert (long["type"], len(long["message"])) == ("Warning", 1024)


def test_the_same_event_has_the_same_name_and_another_one_has_another() -> None:
    def name(job: dict[str, Any], news: JobEvent) -> str:
        return str(event_object(job, news, identity="x", now=START)["metadata"]["name"])

    assert name(a_job(), NEWS) == name(a_job(), NEWS)
    assert name(a_job(), NEWS) != name(a_job("8"), NEWS)
    assert name(a_job(), NEWS) != name(a_job(), JobEvent(EventReason.SCALED, "scaled from 3 to 4 pods"))


def deleted(state: dict[str, Any], *, gone: float = 100, grace: int = 30) -> dict[str, Any]:
    """A pod that was deleted, in its last state; ``gone`` is when its grace would have ended."""
    pod = cluster_objects.pod(1, "bbbbb", state=state)
    pod["metadata"] |= {"deletionTimestamp": at(gone), "deletionGracePeriodSeconds": grace}
    return pod


def said(body: dict[str, Any]) -> str | None:
    event = deleted_pod_event(body)
    if event is None:
        return None
    assert event.reason == EventReason.POD_DELETED
    return event.message


def test_the_last_message_of_a_deleted_pod_is_an_event() -> None:
    left = encode_termination_message(TerminationMessage(reason="Left", message="left on SIGTERM in round 4")).decode()
    assert said(deleted(died(143, left, after=75))) == (
        "digits-1-bbbbb, which was deleted, said last: left on SIGTERM in round 4"
    )
    assert said(deleted(died(137, "", after=99))) == "digits-1-bbbbb, which was deleted, was killed by SIGKILL"
    assert said(deleted(died(1, "ValueError: no data", after=75))) == (
        "digits-1-bbbbb, which was deleted, exited with code 1: ValueError: no data"
    )


@pytest.mark.parametrize(
    "body",
    [
        deleted(died(1, "ValueError: no data", after=60)),
        deleted(died(143, "", after=75)),
        deleted({"running": {"startedAt": at(2)}}),
        deleted({"waiting": {"reason": "ImagePullBackOff"}}),
        cluster_objects.pod(1, "bbbbb", state=died(1, "ValueError: no data")),
    ],
    ids=["it had ended before", "it left without a word", "it runs", "it never ran", "nobody deleted it"],
)
def test_a_pod_without_a_new_message_gives_no_event(body: dict[str, Any]) -> None:
    assert said(body) is None
