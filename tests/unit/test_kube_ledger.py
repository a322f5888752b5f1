"""What is remembered of what the API server would not make."""

from __future__ import annotations

from dataclasses import replace

from elastic_operator.kube.ledger import Ledger
from tests.support.builders import a_job


class Clock:
    """A time that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_refusal_holds_for_the_spec_that_was_refused_and_no_other() -> None:
    ledger = Ledger()
    ledger.refuse(a_job(generation=2), 'unknown field "spec.x"')

    assert ledger.refusal(a_job(generation=2)) == 'unknown field "spec.x"'
    assert ledger.refusal(a_job(generation=3)) is None
    assert ledger.refusal(replace(a_job(generation=2), uid="another")) is None


def test_a_hindrance_is_tried_again_later_and_later_until_it_is_gone() -> None:
    clock = Clock()
    ledger, job = Ledger(clock), a_job()
    waits = []
    for _ in range(9):
        ledger.hinder(job, "exceeded quota")
        assert ledger.hindrance(job) == "exceeded quota"
        waits.append(ledger.wait(job))
        clock.now += waits[-1]
        assert ledger.wait(job) == 0
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]

    assert ledger.clear(job)
    assert not ledger.clear(job)
    assert ledger.hindrance(job) is None
    ledger.hinder(job, "exceeded quota")
    assert ledger.wait(job) == 0.5


def test_another_spec_need_not_wait_and_a_job_that_is_gone_is_forgotten() -> None:
    ledger = Ledger(Clock())
    ledger.hinder(a_job(generation=1), "exceeded quota")
    assert ledger.wait(a_job(generation=2)) == 0
    ledger.forget(a_job().uid)
    assert ledger.hindrance(a_job(generation=1)) is None
