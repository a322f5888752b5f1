"""What is remembered of pods that are gone, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_operator.kube.departed import Departed
from elastic_operator.kube.observation import pod_of
from elastic_operator.model import Pod, PodPhase
from elastic_operator.plan.roster import Verdict, verdict
from tests.support.cluster_objects import JOB_UID, pod


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def departed(clock: Clock) -> Departed:
    found = Departed(clock)
    found.add(JOB_UID, pod(1, "old"))
    return found


def there(index: int, name: str, phase: PodPhase = PodPhase.RUNNING, *, terminating: bool = False) -> Pod:
    return replace(pod_of(pod(index, name)), phase=phase, terminating=terminating)


def test_one_that_is_gone_was_deleted_and_does_not_run(departed: Departed) -> None:
    [gone] = departed.of(JOB_UID, [there(0, "first")])

    assert (gone.name, gone.index, gone.ready) == ("digits-1-old", 1, False)
    assert gone.phase.ended
    assert verdict(gone) is Verdict.LEFT


def test_it_is_forgotten_for_good_when_another_has_taken_its_place(departed: Departed) -> None:
    assert departed.of(JOB_UID, [there(1, "new")]) == ()
    assert departed.of(JOB_UID, []) == ()


@pytest.mark.parametrize(
    "predecessor",
    [there(1, "older", PodPhase.FAILED), there(1, "older", terminating=True)],
    ids=["ended", "going"],
)
def test_the_remains_of_another_do_not_take_its_place(departed: Departed, predecessor: Pod) -> None:
    assert [gone.name for gone in departed.of(JOB_UID, [predecessor])] == ["digits-1-old"]


def test_the_last_of_a_place_counts(departed: Departed) -> None:
    departed.add(JOB_UID, pod(1, "newer"))

    assert [gone.name for gone in departed.of(JOB_UID, [])] == ["digits-1-newer"]


def test_one_whose_place_nobody_takes_is_forgotten_in_time(departed: Departed, clock: Clock) -> None:
    clock.now = 901.0

    assert departed.of(JOB_UID, []) == ()


def test_with_its_job_it_is_forgotten(departed: Departed) -> None:
    assert departed.of("another job", []) == ()
    departed.forget(JOB_UID)
    assert departed.of(JOB_UID, []) == ()
