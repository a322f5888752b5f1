"""The output of `elasticjob run`: live view, plain lines, outcome, and suggested commands."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from elastic_operator.cli.run import PlainView, choose_view
from elastic_operator.errors import ElasticJobError
from elastic_operator.local.view import LiveView, Step, outcome, own_command, render
from elastic_operator.views import formatting
from tests.support.cluster_objects import START
from tests.support.snapshots import FOLDER, KILLED, RUN, event, pod, snapshot, view

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_operator.views.job_view import JobView

NOW = START + 72


def live_view(of: JobView, width: int = 80, **options: Any) -> list[str]:
    console = Console(file=io.StringIO(), record=True, width=width, height=200, color_system=None)
    console.print(render(of, NOW, "elasticjob", **options))
    return [line.rstrip() for line in console.export_text().splitlines()]


def words(lines: list[str]) -> list[str]:
    return [" ".join(line.split()) for line in lines]


# The live view


@pytest.mark.parametrize("width", [80, 120, 400])
def test_the_live_view_shows_state_progress_events_and_commands(width: int) -> None:
    lines = live_view(view(), width)
    text = " ".join(words(lines))
    assert all(len(line) <= min(width, 120) for line in lines)
    assert lines[0].split() == ["digits", "Running", "1m12s"]
    assert words(lines)[1].startswith("round 4 world size 2 pods 2/3 ")
    assert "restarts 1" in lines[1]
    assert "epoch 12/120 step 612/1348 loss 0.213" in text
    assert KILLED in text, "the complete reason"
    assert {f"logs {FOLDER}/logs", f"checkpoints {FOLDER}/checkpoints"} <= {*words(lines)}
    for command in ("scale digits --replicas 2", "logs digits --rank 0 -f", "describe digits", "get", "delete digits"):
        assert f"elasticjob {command}" in text


def test_ready_spares_are_shown_beside_the_pods() -> None:
    with_spares = view(spec={"spares": 2}, status={"readySpares": 1})
    assert "spares 1/2" in words(live_view(with_spares))[1]
    assert "Spares:        2 desired, 1 ready" in formatting.description(with_spares, NOW)
    assert "spares" not in words(live_view(view()))[1]


def test_events_show_the_time_since_the_start_and_demo_steps_show_a_mark() -> None:
    steps = [Step("start with 2 pods", "+", "4.1 s"), Step("scale to 3", ">"), Step("kill -9 a worker")]
    events = [event(3, "round 1: 2 workers."), event(3723, "round 2: 3 workers.")]
    lines = {*words(live_view(view(events=events), steps=steps))}
    assert {"3s round 1: 2 workers.", "1h02m round 2: 3 workers."} <= lines
    assert {"✔ start with 2 pods 4.1 s", "▶ scale to 3", "· kill -9 a worker"} <= lines


@pytest.mark.parametrize(
    ("desired", "low", "high", "suggested"),
    [(2, 1, 3, "scale digits --replicas 3"), (3, 1, 3, "scale digits --replicas 2"), (2, 2, 2, "")],
)
def test_the_suggested_size_is_valid(desired: int, low: int, high: int, suggested: str) -> None:
    of = view(spec={"minReplicas": low, "maxReplicas": high}, status={"desired": desired})
    text = "\n".join(live_view(of))
    assert suggested in text
    assert bool(suggested) == ("scale" in text)


def test_the_suggestions_follow_the_state_of_the_job() -> None:
    suspended = "\n".join(live_view(view(status={"state": "Suspended"}, pods=[])))
    assert "digits  Suspended" in suspended
    assert "elasticjob resume digits" in suspended
    assert "scale" not in suspended
    ending = "\n".join(live_view(view(), ending="ending…"))
    assert "ending…" in ending
    assert "second terminal" not in ending


def test_output_of_a_program_cannot_corrupt_the_live_view() -> None:
    line = "before 10%\r\x1b[2J\x1b[31mloss\x1b[0m\t0.1 [bold]50%[/bold]\x1b]0;title\x07\x07"
    lines = live_view(view(progress={"line": line, "time": NOW}))
    assert lines[3] == " loss    0.1 [bold]50%[/bold]"
    assert not any("\x1b" in line or "before" in line or "title" in line for line in lines)


def test_an_early_snapshot_and_one_of_another_version_are_shown() -> None:
    early = view(
        status={"state": "Pending", "round": 0, "worldSize": 0, "readyReplicas": 0}, pods=[], events=[], progress=None
    )
    lines = live_view(early)
    assert lines[0].split()[:2] == ["digits", "Pending"]
    assert view(news=[1, 2], status={"suspended": True}).status.round == 4
    with pytest.raises(ElasticJobError, match=r"the state of the job digits cannot be read .* by another version"):
        _ = view(status={"round": "four"}).status


# Plain lines


class Plain:
    """A view of plain lines, and the printed lines."""

    def __init__(self) -> None:
        self.output = io.StringIO()
        self.shown = PlainView(self.output, "elasticjob", lambda: NOW)

    def printed(self) -> list[str]:
        lines = self.output.getvalue().splitlines()
        assert all(line[2] == line[5] == ":" and line[8:10] == "  " for line in lines)
        self.output.seek(0)
        self.output.truncate()
        return [line[10:] for line in lines]


def test_plain_lines_show_each_event_and_each_change_once() -> None:
    plain = Plain()
    first = view()
    plain.shown.on_snapshot(first)
    lines = plain.printed()
    assert lines[:2] == [f"logs: {FOLDER}/logs", f"checkpoints: {FOLDER}/checkpoints"]
    assert any("elasticjob scale digits --replicas 2" in line for line in lines)
    assert f"! {KILLED}" in lines
    plain.shown.on_snapshot(first)
    assert plain.printed() == []
    events = [*snapshot()["events"][1:], event(80, "round 5: 3 workers on 3 pods.")]  # the oldest was dropped
    plain.shown.on_snapshot(view(events=events, status={"round": 5, "worldSize": 3, "readyReplicas": 3}))
    assert plain.printed() == ["round 5: 3 workers on 3 pods."]
    plain.shown.on_snapshot(view(events=events, status={"state": "Waiting", "worldSize": 0}))
    assert plain.printed() == ["digits is Waiting"]


def test_plain_lines_show_each_line_of_output_with_its_rank(tmp_path: Path) -> None:
    def print_as(rank: int, text: str, *, round: int = 1) -> None:
        (folder := tmp_path / "digits-0" / f"round_{round}" / f"rank_{rank}").mkdir(parents=True, exist_ok=True)
        with (folder / "output.log").open("a") as log:
            log.write(text)

    plain, job = Plain(), view(run={**snapshot()["run"], "logs": str(tmp_path)})
    print_as(0, "before the run was resumed\n")
    plain.shown.on_snapshot(job)
    plain.printed()
    print_as(0, "step 1\nstep 2\nst")
    print_as(0, "started\n", round=2)
    print_as(1, "10%\r\x1b[32m20%\x1b[0m\r", round=2)
    plain.shown.on_snapshot(job)
    expected = ["step 1", "step 2", "st", "started"]
    assert plain.printed() == [*(f"| [rank 0] {line}" for line in expected), "| [rank 1] 20%"]
    print_as(1, "30%", round=2)
    plain.shown.on_snapshot(job)
    assert plain.printed() == []
    plain.shown.say_outcome(0)
    assert plain.printed()[0] == "| [rank 1] 30%"


# The outcome


def ended(how: str, code: int, message: str = "") -> dict[str, Any]:
    return {"ended": {"how": how, "exitCode": code, "message": message, "time": NOW}, "alive": False}


def test_the_outcome_has_its_reason_the_paths_and_the_command_to_resume() -> None:
    done = view(
        status={"state": "Succeeded"}, run=ended("succeeded", 0), progress={"line": "test accuracy 0.973", "time": NOW}
    )
    assert outcome(done, NOW, 0, "elasticjob") == [
        "digits succeeded after 1m12s: test accuracy 0.973",
        f"logs         {FOLDER}/logs",
        f"checkpoints  {FOLDER}/checkpoints",
    ]
    failed = view(status={"state": "Failed"}, run=ended("failed", 1, "rank 0 exited with ValueError: no"))
    first, *rest = outcome(failed, NOW, 1, "elasticjob")
    assert first == "digits failed after 1m12s: rank 0 exited with ValueError: no"
    assert rest[-1] == f"resume with  elasticjob run --resume {RUN} /home/ada/examples/digits.yaml"
    assert outcome(view(), NOW, 3, "elasticjob")[0] == "digits was deleted after 1m12s."
    assert outcome(view(), NOW, 130, "elasticjob")[0] == "digits was interrupted after 1m12s."


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("plain", "environ", "output", "kind"),
    [
        (False, {"TERM": "xterm"}, Terminal(), LiveView),
        (False, {"TERM": "xterm"}, io.StringIO(), PlainView),
        (True, {"TERM": "xterm"}, Terminal(), PlainView),
        (False, {"TERM": "xterm", "NO_COLOR": "1"}, Terminal(), PlainView),
        (False, {"TERM": "dumb"}, Terminal(), PlainView),
        (False, {}, Terminal(), PlainView),
    ],
)
def test_a_terminal_gets_the_live_view(plain: bool, environ: dict[str, str], output: io.StringIO, kind: type) -> None:
    assert type(choose_view(plain=plain, command="elasticjob", output=output, environ=environ)) is kind


def test_the_suggested_commands_work_in_the_next_terminal(tmp_path: Path) -> None:
    def executable(path: Path) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return str(path)

    command = executable(tmp_path / "tools" / "elasticjob")
    assert own_command(command, {"PATH": str(tmp_path / "tools")}) == "elasticjob"
    assert own_command(command, {"PATH": "/nowhere"}) == command
    activated = {"PATH": str(tmp_path / "tools"), "VIRTUAL_ENV": str(tmp_path)}
    assert own_command(command, activated) == command, "the next terminal has not activated the virtual environment"


# Formatting


def test_paths_are_quoted_for_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert formatting.shell_path("/home/ada/runs/x") == "~/runs/x"
    assert formatting.shell_path("/home/ada/my runs/x") == "'/home/ada/my runs/x'"
    assert formatting.shell_path(".venv/bin/elasticjob") == ".venv/bin/elasticjob"


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0, "0s"), (59.9, "59s"), (72, "1m12s"), (3600, "1h00m"), (7500, "2h05m"), (90000, "1d1h"), (-3, "0s")],
)
def test_durations_are_written_as_by_kubectl(seconds: float, written: str) -> None:
    assert formatting.duration(seconds) == written


@pytest.mark.parametrize(
    ("numbers", "written"), [((), "-"), ((3,), "3"), ((0, 1, 2, 3), "0-3"), ((0, 1, 4, 6, 7), "0-1, 4, 6-7")]
)
def test_ranks_are_written_as_ranges(numbers: tuple[int, ...], written: str) -> None:
    assert formatting.rank_list(numbers) == written


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"phase": "Pending", "ready": False, "ranks": []}, "starting"),
        ({"ready": False}, "starting"),
        ({"ranks": []}, "joining"),
        ({"ranks": [], "spare": True}, "standing by"),
        ({}, "training"),
        ({"terminating": True}, "leaving"),
        ({"phase": "Succeeded", "ended": NOW, "exitCode": 0}, "done"),
        ({"phase": "Failed", "ended": NOW, "exitCode": 143}, "left"),
        ({"phase": "Failed", "ended": NOW, "exitCode": 139}, "SIGSEGV"),
        ({"phase": "Failed", "ended": NOW, "exitCode": 255}, "failed (255)"),
        ({"phase": "Failed", "ended": NOW, "exitCode": None}, "ended"),
    ],
)
def test_the_activity_of_a_pod_is_described_in_words(changes: dict[str, Any], word: str) -> None:
    assert formatting.activity(view(pods=[pod(0, "aaaaa", **changes)]).pods[0])[0] == word
