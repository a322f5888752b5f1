"""What is said where a real Kubernetes cannot be had, and that nobody can take silence for success."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.testbed import availability
from tests.support.testbed.availability import Step
from tests.support.testbed.cache import Missing

REPOSITORY = Path(__file__).parents[2]
GO = Missing("Go 1.26 or later", "install it")
ROOT = Missing("root", "run the tests as root")


def test_the_closing_words_say_what_did_not_run_and_what_would_bring_it() -> None:
    assert availability.closing_words({"control_plane": GO, "node": ROOT}, {"control_plane": 7, "node": 1}) == [
        "The tests on a real Kubernetes did NOT run: 7 tests with a real API server.",
        "  missing: Go 1.26 or later",
        "  what brings it: install it",
        "The tests on a real Kubernetes did NOT run: 1 test with a real kubelet.",
        "  missing: root",
        "  what brings it: run the tests as root",
    ]


def test_what_both_lack_is_told_once() -> None:
    words = availability.closing_words({"control_plane": GO, "node": GO})
    assert words[0] == ("The tests on a real Kubernetes did NOT run: tests with a real API server and a real kubelet.")
    assert len(words) == 3


def test_where_nothing_is_missing_nothing_is_said() -> None:
    assert availability.closing_words({}) == []


@pytest.mark.parametrize(("ci", "failure"), [("true", True), ("1", True), ("True", True), ("", False), ("0", False)])
def test_only_in_ci_it_is_a_failure(monkeypatch: pytest.MonkeyPatch, ci: str, failure: bool) -> None:
    monkeypatch.setenv("CI", ci)
    assert availability.must_not_miss() == failure


def test_steps_are_told_with_their_time_and_the_first_that_fails_is_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    said: list[str] = []

    def step(what: str, *, minutes: float, ready: bool = False, missing: Missing | None = None) -> Step:
        def make() -> None:
            made.append(what)
            if missing:
                raise missing

        return Step(what=what, minutes=minutes, is_ready=lambda: ready, make=make)

    steps = {
        "control_plane": [step("a", minutes=8), step("b", minutes=0.5, ready=True)],
        "node": [step("c", minutes=0.5), step("d", minutes=1, missing=GO), step("e", minutes=1)],
    }
    monkeypatch.setattr(availability, "steps", steps.__getitem__)
    monkeypatch.setattr(availability, "check_machine", lambda bed: None)
    assert availability.prepare(["node", "control_plane"], said.append) == {"node": GO}
    assert made == ["a", "b", "c", "d"]
    assert said == [
        "The test bed of a real Kubernetes is made, once: about 10 minutes on two cores.",
        "- a: about 8 minutes",
        "- c: about 30 seconds",
        "- d: about 1 minutes",
    ]


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
    _, _, end = run.stdout.rpartition(" a real Kubernetes =")
    assert re.search(r"The tests on a real Kubernetes did NOT run: \d+ tests with a real API server\.", end)
    assert "missing: Go 1.26 or later" in end
    assert "too old for this (go1.19.8)" in end
    assert run.returncode == code


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("1", 1)])
def test_preparing_says_what_cannot_be_had(tmp_path: Path, ci: str, code: int) -> None:
    run = with_an_old_go(tmp_path, "-m", "tests.support.testbed", "prepare", "control_plane", CI=ci)
    assert "- etcd v3." in run.stdout
    assert "did NOT run: tests with a real API server" in run.stderr
    assert "https://go.dev/dl/" in run.stderr
    assert run.returncode == code


def test_counting_the_tests_makes_nothing(tmp_path: Path) -> None:
    run = with_an_old_go(tmp_path, *PYTEST, "--collect-only", "-q")
    assert run.returncode == 0
    assert re.search(r"\d tests collected", run.stdout)
    assert "did NOT run" not in run.stdout
