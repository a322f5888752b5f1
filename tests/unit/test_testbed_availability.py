"""What is said where something that tests run on cannot be had, and that nobody can take silence for success."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.testbed import availability, steps
from tests.support.testbed.cache import Missing
from tests.support.testbed.steps import Lane, Step

REPOSITORY = Path(__file__).parents[2]
GO = Missing("Go 1.26 or later", "install it")
ROOT = Missing("root", "run the tests as root")


def test_the_closing_words_say_what_did_not_run_and_what_would_bring_it() -> None:
    assert availability.closing_words({"control_plane": GO, "node": ROOT}, {"control_plane": 7, "node": 1}) == [
        "Did NOT run: 7 tests with a real API server.",
        "  missing: Go 1.26 or later",
        "  what brings it: install it",
        "Did NOT run: 1 test with a real kubelet.",
        "  missing: root",
        "  what brings it: run the tests as root",
    ]


def test_what_both_lack_is_told_once() -> None:
    words = availability.closing_words({"control_plane": GO, "node": GO})
    assert words[0] == "Did NOT run: tests with a real API server and a real kubelet."
    assert len(words) == 3


def test_where_nothing_is_missing_nothing_is_said() -> None:
    assert availability.closing_words({}) == []


@pytest.mark.parametrize(("ci", "failure"), [("true", True), ("1", True), ("True", True), ("", False), ("0", False)])
def test_only_in_ci_it_is_a_failure(monkeypatch: pytest.MonkeyPatch, ci: str, failure: bool) -> None:
    monkeypatch.setenv("CI", ci)
    assert availability.must_not_miss() == failure


class Made:
    """Steps that only say that they were taken."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.said: list[str] = []

    def step(
        self, what: str, lane: Lane, minutes: float, *, ready: bool = False, missing: Missing | None = None
    ) -> Step:
        def make() -> None:
            self.log.append(what)
            if missing:
                raise missing

        return Step(what=what, lane=lane, minutes=minutes, is_ready=lambda: ready, make=make)


@pytest.fixture
def made() -> Made:
    return Made()


def test_what_is_there_is_not_made_again_and_nothing_is_said(made: Made) -> None:
    assert steps.make([made.step("a", Lane.COMPILER, 8, ready=True)], made.said.append) == {}
    assert (made.log, made.said) == ([], [])


def test_what_is_made_is_told_with_its_time(made: Made) -> None:
    wanted = [
        made.step("last", Lane.LAST, 1),
        made.step("a", Lane.COMPILER, 8),
        made.step("a", Lane.COMPILER, 8),
        made.step("b", Lane.COMPILER, 0.5, ready=True),
    ]
    assert steps.make(wanted, made.said.append) == {}
    assert made.log == ["a", "last"]
    assert made.said == [
        "What the tests run on is made: up to 9 minutes on two cores.",
        "- a: up to 8 minutes",
        "  a: done in 0 s",
        "- last: up to 60 seconds",
        "  last: done in 0 s",
    ]


def test_the_lanes_go_on_side_by_side(made: Made) -> None:
    meeting = threading.Barrier(2, timeout=30)  # broken, and an error, if one waits for the other to end
    sides = [replace(made.step(lane.name, lane, 1), make=meeting.wait) for lane in (Lane.COMPILER, Lane.DOWNLOADS)]
    assert steps.make(sides, made.said.append) == {}


def test_what_cannot_be_made_does_not_keep_the_rest_from_being_made(made: Made) -> None:
    wanted = [made.step("a", Lane.COMPILER, 1, missing=GO), made.step("b", Lane.COMPILER, 1)]
    assert steps.make(wanted, made.said.append) == {"a": GO}
    assert made.log == ["a", "b"]


def test_a_bed_is_missing_for_the_first_of_its_needs_that_cannot_be_had(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {
        "control_plane": [made.step("a", Lane.COMPILER, 1)],
        "node": [
            made.step("a", Lane.COMPILER, 1),
            made.step("b", Lane.LAST, 1, missing=ROOT),
            made.step("c", Lane.COMPILER, 1, missing=GO),
        ],
    }
    monkeypatch.setattr(availability, "needs", needs.__getitem__)
    monkeypatch.setattr(availability, "check_machine", lambda bed: None)
    assert availability.prepare(["node", "control_plane"], made.said.append) == {"node": ROOT}


def test_a_machine_on_which_a_bed_cannot_run_is_not_kept_busy_for_it(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(bed: str) -> None:
        raise ROOT

    monkeypatch.setattr(availability, "check_machine", refuse)
    assert availability.prepare(["node"], made.said.append) == {"node": ROOT}
    assert made.said == []


def with_an_old_go(tmp_path: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python as somebody whose Go is too old, and who has built nothing."""
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\necho go1.19.8\n")
    go.chmod(0o755)
    without = {"CI", "KUBEBUILDER_ASSETS", "ELASTICJOB_TEST_KUBECONFIG"}
    kept = {name: value for name, value in os.environ.items() if name not in without}
    own = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env={**kept, **own, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "tests/kubernetes/test_control_plane.py")


@pytest.mark.parametrize(("ci", "code"), [("false", 5), ("true", 1)])
def test_tests_that_cannot_run_are_named_at_the_end_and_fail_in_ci(tmp_path: Path, ci: str, code: int) -> None:
    run = with_an_old_go(tmp_path, *PYTEST, CI=ci)
    _, _, end = run.stdout.rpartition(" tests that did not run =")
    assert re.search(r"Did NOT run: \d+ tests with a real API server\.", end)
    assert "missing: Go 1.26 or later" in end
    assert "too old for this (go1.19.8)" in end
    assert run.returncode == code


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("1", 1)])
def test_preparing_says_what_cannot_be_had(tmp_path: Path, ci: str, code: int) -> None:
    run = with_an_old_go(tmp_path, "-m", "tests.support.testbed", "prepare", "control_plane", CI=ci)
    assert run.stdout == ""  # what can be told at once is told before minutes are spent
    assert "Did NOT run: tests with a real API server" in run.stderr
    assert "https://go.dev/dl/" in run.stderr
    assert run.returncode == code


def test_counting_the_tests_makes_nothing(tmp_path: Path) -> None:
    run = with_an_old_go(tmp_path, *PYTEST, "--collect-only", "-q")
    assert run.returncode == 0
    assert re.search(r"\d tests collected", run.stdout)
    assert "did NOT run" not in run.stdout
