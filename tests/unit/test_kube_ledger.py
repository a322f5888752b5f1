"""What is remembered of what the API server would not make."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elastic_operator.kube.api_error import refusal
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


def test_a_hindrance_outlives_an_edit_which_is_tried_at_once() -> None:
    ledger = Ledger()
    ledger.hinder(a_job(generation=2), "exceeded quota")

    edited = a_job(generation=3)
    assert (ledger.hindrance(edited), ledger.wait(edited)) == ("exceeded quota", 0)
    assert ledger.clear(edited)
    assert ledger.hindrance(edited) is None


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


def test_a_server_that_fails_is_a_hindrance_only_when_it_does_so_in_a_row_and_for_a_while() -> None:
    clock = Clock()
    ledger, job = Ledger(clock, lasting=5.0), a_job()
    assert [ledger.fails(job) for _ in range(4)] == [False] * 4
    clock.now = 6.0
    assert ledger.fails(job)
    ledger.made(job)
    assert not ledger.fails(job)
    clock.now = 20.0
    assert [ledger.fails(job), ledger.fails(job)] == [False, True]
    ledger.clear(job)
    clock.now = 40.0
    assert not ledger.fails(job)
    ledger.forget(job.uid)
    assert not ledger.fails(job)


def test_another_spec_need_not_wait_and_a_job_that_is_gone_is_forgotten() -> None:
    ledger = Ledger(Clock())
    ledger.hinder(a_job(generation=1), "exceeded quota")
    assert ledger.wait(a_job(generation=2)) == 0
    ledger.forget(a_job().uid)
    assert ledger.hindrance(a_job(generation=1)) is None


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (400, 'admission webhook "policy.example.org" denied the request: no image of this registry'),
        (
            422,
            """pods "digits-0" is forbidden: ValidatingAdmissionPolicy 'few' with binding 'few' denied request: no""",
        ),
    ],
)
def test_what_a_policy_refuses_today_it_may_allow_tomorrow(status: int, words: str) -> None:
    error = refusal(status, json.dumps({"reason": "Invalid", "message": words}).encode())
    assert error.of_a_policy
    assert not error.rejects_object


def test_what_the_api_server_itself_finds_wrong_stays_wrong() -> None:
    error = refusal(422, json.dumps({"reason": "Invalid", "message": 'Pod "digits-0" is invalid: spec.x'}).encode())
    assert error.rejects_object
    assert not error.of_a_policy
