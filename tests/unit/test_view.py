from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from elastic_operator.local.act import Act
from elastic_operator.local.hints import Hints, own_hints
from elastic_operator.local.render import render
from elastic_operator.local.view import LiveView, PlainView, choose_view, outcome
from elastic_operator.showing import words
from elastic_operator.showing.shown import Shown
from tests.support.snapshots import FOLDER, KILLED, RUN, START, event, pod, snapshot

if TYPE_CHECKING:
    from pathlib import Path

NOW = START + 72


def picture(of: dict[str, Any], width: int = 80, height: int | None = None, **how: Any) -> list[str]:
    console = Console(file=io.StringIO(), record=True, width=width, height=200, color_system=None)
    console.print(render(of, NOW, width, height, **how))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_picture_says_what_matters_at_any_width(width: int) -> None:
    lines = picture(snapshot(), width, hints=Hints())
    text = " ".join(" ".join(line.split()) for line in lines)
    assert all(len(line) <= width for line in lines)
    assert lines[0].split() == ["digits", "Running", "1:12"]
    assert lines[1].split()[:9] == ["epoch", "4", "world", "size", "2", "pods", "2/3", *lines[1].split()[7:9]]
    assert "restarts 1" in lines[1]
    assert "epoch 12/120 step 612/1348 loss 0.213" in text
    assert KILLED in text, "what died and why is told to its end"
    if width >= 80:
        assert f"logs {FOLDER}/logs" in text
        assert f"checkpoints {FOLDER}/checkpoints" in text
    else:
        assert f"logs and checkpoints are below {FOLDER} " in text
    for command in ("scale digits --replicas 2", "logs digits --rank 0 -f", "describe digits", "get", "delete digits"):
        assert f"elasticjob {command}" in text


def test_each_pod_has_a_line_with_its_process_state_ranks_and_age() -> None:
    lines = [line.split() for line in picture(snapshot())]
    assert ["POD", "PID", "STATE", "RANKS", "AGE"] in lines
    assert ["digits-0-aaaaa", "48200", "training", "0", "1m12s"] in lines
    assert ["digits-2-ddddd", "48202", "starting", "-", "3s"] in lines
    assert ["digits-2-ccccc", "-", "SIGKILL", "-", "1m08s"] in lines


def test_the_last_words_of_a_pod_that_ended_are_shown() -> None:
    last_words = {"reason": "StoreUnavailable", "message": "etcd at 127.0.0.1:1 does not answer", "contract": 1}
    ended = pod(1, "bbbbb", phase="Failed", ended=NOW, exitCode=3, message=last_words)
    lines = picture(snapshot(pods=[pod(0, "aaaaa"), ended]))
    assert any("failed (3)" in line and "etcd at 127.0.0.1:1 does n" in line and "1m12s" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_events_are_timed_from_the_start_of_the_job() -> None:
    lines = picture(snapshot(events=[event(3, "epoch 1: 2 workers."), event(3723, "epoch 2: 3 workers.")]))
    assert "  0:03  epoch 1: 2 workers." in lines
    assert "1:02:03  epoch 2: 3 workers." in [line.strip() for line in lines]


@pytest.mark.parametrize("height", range(6, 40))
def test_the_picture_fits_the_terminal_however_small(height: int) -> None:
    many = snapshot(
        pods=[pod(index, "aaaaa") for index in range(12)],
        events=[event(at, f"something happened at {at}") for at in range(20)],
    )
    lines = picture(many, 80, height, hints=Hints())
    assert len(lines) <= height
    assert lines[0].split()[:2] == ["digits", "Running"]
    assert any("digits-0-aaaaa" in line for line in lines)


def test_on_an_ordinary_terminal_of_24_lines_nothing_important_is_missing() -> None:
    lines = picture(snapshot(), 80, 24, hints=Hints(first=". ~/project/.venv/bin/activate"))
    text = "\n".join(lines)
    assert KILLED in " ".join(text.split())
    assert f"{FOLDER}/logs" in text
    assert "digits-2-ddddd" in text
    assert "elasticjob scale digits --replicas 2" in text


@pytest.mark.parametrize("width", [1, 7, 20, 33, 400])
@pytest.mark.parametrize("height", [1, 2, 5, 400])
def test_no_size_of_the_terminal_is_too_strange(width: int, height: int) -> None:
    many = snapshot(pods=[pod(index, "aaaaa", ranks=list(range(8 * index, 8 * index + 8))) for index in range(40)])
    lines = picture(many, width, height, hints=Hints(), acts=[Act("scale to 3", ">")])
    assert len(lines) <= max(height, 2)
    assert all(len(line) <= width for line in lines)


def test_pods_that_do_not_fit_are_counted() -> None:
    lines = picture(snapshot(pods=[pod(index, "aaaaa") for index in range(12)]), 80, 14)
    shown = [line for line in lines if "aaaaa" in line]
    assert f"and {12 - len(shown)} more pods" in [line.strip() for line in lines]


def test_a_long_path_is_never_shortened() -> None:
    place = "/" + "x" * 70 + "/logs"
    lines = picture(snapshot(run={"logs": place}), 60)
    assert place in "".join(lines)


def test_the_suggested_size_is_one_that_the_job_may_have() -> None:
    def suggested(replicas: int, least: int, most: int) -> str:
        of = snapshot(spec={"minReplicas": least, "maxReplicas": most}, status={"desired": replicas})
        return "\n".join(picture(of, hints=Hints()))

    assert "scale digits --replicas 3" in suggested(2, 1, 3)
    assert "scale digits --replicas 2" in suggested(3, 1, 3)
    assert "scale" not in suggested(2, 2, 2)


def test_a_job_that_rests_can_be_resumed_and_not_scaled() -> None:
    text = "\n".join(picture(snapshot(status={"state": "Suspended"}, pods=[]), hints=Hints()))
    assert "digits  Suspended" in text
    assert "elasticjob resume digits" in text
    assert "scale" not in text


def test_suggestions_start_with_what_makes_the_command_available() -> None:
    lines = picture(snapshot(), hints=Hints(first=". ~/project/.venv/bin/activate"))
    start = next(number for number, line in enumerate(lines) if "second terminal" in line)
    assert ". ~/project/.venv/bin/activate" in lines[start + 1]


def test_while_it_ends_the_picture_says_so_and_suggests_nothing() -> None:
    text = "\n".join(picture(snapshot(), hints=Hints(), ending="ending…"))
    assert "ending…" in text
    assert "second terminal" not in text


def test_what_a_program_prints_cannot_disturb_the_picture() -> None:
    line = "before 10%\r\x1b[2J\x1b[31mloss\x1b[0m\t0.1 [bold]50%[/bold]\x1b]0;title\x07\x07"
    lines = picture(snapshot(progress={"line": line, "time": NOW}))
    assert lines[3] == " loss    0.1 [bold]50%[/bold]"
    assert not any("\x1b" in line or "before" in line or "title" in line for line in lines)


def test_a_job_that_has_only_begun_can_be_shown() -> None:
    begun = snapshot(status={"state": "Pending", "epoch": 0, "worldSize": 0, "ready": 0}, pods=[], events=[])
    lines = picture(begun | {"progress": None, "etcd": {"pid": None, "endpoint": None, "restarts": 0}})
    assert lines[0].split()[:2] == ["digits", "Pending"]


def test_a_snapshot_of_another_version_is_still_shown() -> None:
    later = snapshot(news=[1, 2], status={"suspended": True})
    assert Shown.of(later).status.epoch == 4
    assert Shown.of({"manifest": {"metadata": {"name": "old"}}}).name == "old"


def test_the_acts_of_the_demo_are_marked() -> None:
    acts = [Act("start with 2 pods", "+", "4.1 s"), Act("scale to 3", ">"), Act("kill -9 a worker")]
    lines = [line.strip() for line in picture(snapshot(), acts=acts)]
    assert "✔ start with 2 pods  4.1 s" in lines
    assert "▶ scale to 3" in [line.rstrip() for line in lines]
    assert "· kill -9 a worker" in lines


class Clock:
    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def said_by(view: PlainView, output: io.StringIO) -> list[str]:
    lines = [line[10:] for line in output.getvalue().splitlines()]
    output.seek(0)
    output.truncate()
    return lines


def test_plain_lines_begin_with_the_time_the_places_and_what_to_try() -> None:
    output = io.StringIO()
    PlainView(output, Hints(), Clock()).on_snapshot(snapshot())
    lines = output.getvalue().splitlines()
    assert all(line[2] == line[5] == ":" and line[8:10] == "  " for line in lines)
    assert lines[0][10:] == f"logs: {FOLDER}/logs"
    assert lines[1][10:] == f"checkpoints: {FOLDER}/checkpoints"
    assert any("elasticjob scale digits --replicas 2" in line for line in lines)


def test_plain_lines_say_each_event_and_each_change_once() -> None:
    output = io.StringIO()
    view = PlainView(output, Hints(), Clock())
    first = snapshot()
    view.on_snapshot(first)
    assert f"! {KILLED}" in said_by(view, output)
    view.on_snapshot(first)
    assert said_by(view, output) == []
    # The oldest has been dropped meanwhile.
    grown = [*first["events"][1:], event(80, "epoch 5: 3 workers on 3 pods.")]
    view.on_snapshot(snapshot(events=grown, status={"epoch": 5, "worldSize": 3, "ready": 3}))
    assert said_by(view, output) == ["epoch 5: 3 workers on 3 pods."]
    view.on_snapshot(snapshot(events=grown, status={"state": "Waiting", "worldSize": 0}))
    assert said_by(view, output) == ["digits is Waiting"]


def test_plain_lines_give_progress_no_more_often_than_every_five_seconds() -> None:
    output = io.StringIO()
    view = PlainView(output, Hints(), Clock())
    for second in range(12):
        view.on_snapshot(snapshot(progress={"line": f"step {second}", "time": NOW + second}))
    assert [line for line in said_by(view, output) if line.startswith("|")] == ["| step 0", "| step 5", "| step 10"]


def test_plain_lines_announce_each_act() -> None:
    output = io.StringIO()
    view = PlainView(output, Hints(), Clock())
    view.show_acts([Act("scale to 3", ">"), Act("success")])
    view.show_acts([Act("scale to 3", "+", "0.4 s"), Act("success", ">")])
    assert said_by(view, output) == ["--- scale to 3", "--- scale to 3: 0.4 s", "--- success"]


def test_a_reader_that_goes_away_does_not_end_the_training() -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    view = PlainView(Gone(), Hints(), Clock())
    view.on_snapshot(snapshot())
    assert view.say_outcome(0) is None


def ended(how: str, code: int, message: str = "") -> dict[str, Any]:
    return {"ended": {"how": how, "exitCode": code, "message": message, "time": NOW}, "alive": False}


def test_success_is_told_with_the_last_line_of_the_program_and_the_places() -> None:
    done = snapshot(
        status={"state": "Succeeded"}, run=ended("succeeded", 0), progress={"line": "test accuracy 0.973", "time": NOW}
    )
    assert outcome(done, NOW, 0, Hints()) == [
        "digits succeeded after 1m12s: test accuracy 0.973",
        f"logs         {FOLDER}/logs",
        f"checkpoints  {FOLDER}/checkpoints",
    ]


def test_failure_is_told_with_its_reason_and_how_to_go_on() -> None:
    failed = snapshot(status={"state": "Failed"}, run=ended("failed", 1, "rank 0 exited with ValueError: no"))
    first, *rest = outcome(failed, NOW, 1, Hints())
    assert first == "digits failed after 1m12s: rank 0 exited with ValueError: no"
    assert rest[-1] == f"go on with   elasticjob run --resume {RUN} /home/ada/examples/digits.yaml"


@pytest.mark.parametrize(("code", "said"), [(3, "was deleted"), (130, "was interrupted")])
def test_other_ends_are_told_as_what_they_are(code: int, said: str) -> None:
    assert outcome(snapshot(), NOW, code, Hints())[0] == f"digits {said} after 1m12s."


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_live_view_gives_the_terminal_back_and_leaves_the_outcome() -> None:
    output = Terminal()
    console = Console(file=output, force_terminal=True, width=80, height=30, color_system=None, legacy_windows=False)
    view = LiveView(console, Hints(), Clock())
    with view:
        view.on_snapshot(snapshot())
    during = output.getvalue()
    assert during.count("\x1b[?1049h") == during.count("\x1b[?1049l") == 1
    assert during.rindex("\x1b[?25h") > during.rindex("\x1b[?25l"), "the cursor is back"
    assert "second terminal" in during
    view.on_snapshot(snapshot(run=ended("interrupted", 130)))
    view.say_outcome(130)
    after = output.getvalue()[len(during) :]
    assert after.split()[:3] == ["digits", "Interrupted", "1:12"]
    assert "digits was interrupted after 1m12s" in after
    assert f"{FOLDER}/checkpoints" in after
    assert "second terminal" not in after


@pytest.mark.parametrize(
    ("plain", "environ"),
    [(True, {"TERM": "xterm"}), (False, {"TERM": "xterm", "NO_COLOR": "1"}), (False, {"TERM": "dumb"}), (False, {})],
)
def test_plain_lines_are_given_to_those_who_ask_for_them(plain: bool, environ: dict[str, str]) -> None:
    view = choose_view(plain=plain, hints=Hints(), output=Terminal(), environ=environ)
    assert isinstance(view, PlainView)


def test_a_terminal_gets_the_live_view_and_a_file_gets_lines() -> None:
    environ = {"TERM": "xterm-256color"}
    assert isinstance(choose_view(plain=False, hints=Hints(), output=Terminal(), environ=environ), LiveView)
    assert isinstance(choose_view(plain=False, hints=Hints(), output=io.StringIO(), environ=environ), PlainView)


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_command_that_every_terminal_finds_is_just_its_name(tmp_path: Path) -> None:
    command = executable(tmp_path / "bin" / "elasticjob")
    assert own_hints(str(command), {"PATH": str(command.parent)}) == Hints()


def test_a_command_in_a_virtual_environment_is_found_after_activating_it(tmp_path: Path) -> None:
    command = executable(tmp_path / "bin" / "elasticjob")
    executable(tmp_path / "bin" / "activate")
    first = f". {tmp_path}/bin/activate"
    assert own_hints(str(command), {"PATH": "/nowhere"}) == Hints(first=first, here=str(command))
    activated = {"PATH": str(command.parent), "VIRTUAL_ENV": str(tmp_path)}
    assert own_hints(str(command), activated) == Hints(first=first), "the next terminal has not activated it"


def test_a_command_off_the_path_is_spelled_out(tmp_path: Path) -> None:
    command = executable(tmp_path / "tools" / "elasticjob")
    assert own_hints(str(command), {"PATH": "/nowhere"}) == Hints(command=str(command), here=str(command))


def test_paths_to_type_are_quoted_where_a_shell_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert words.path_to_type("/home/ada/runs/x") == "~/runs/x"
    assert words.path_to_type("/home/ada/my runs/x") == "'/home/ada/my runs/x'"
    assert words.path_to_type(".venv/bin/elasticjob") == ".venv/bin/elasticjob"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0s"), (59.9, "59s"), (72, "1m12s"), (3600, "1h00m"), (7500, "2h05m"), (90000, "1d1h"), (-3, "0s")],
)
def test_durations_are_said_as_kubectl_says_them(seconds: float, said: str) -> None:
    assert words.duration(seconds) == said


@pytest.mark.parametrize(
    ("numbers", "said"), [((), "-"), ((3,), "3"), ((0, 1, 2, 3), "0-3"), ((0, 1, 4, 6, 7), "0-1, 4, 6-7")]
)
def test_ranks_are_said_as_a_person_writes_them(numbers: tuple[int, ...], said: str) -> None:
    assert words.ranks(numbers) == said


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"phase": "Pending", "ready": False, "ranks": []}, "starting"),
        ({"ready": False}, "starting"),
        ({"ranks": []}, "joining"),
        ({}, "training"),
        ({"terminating": True}, "leaving"),
        ({"phase": "Succeeded", "ended": NOW, "exitCode": 0}, "done"),
        ({"phase": "Failed", "ended": NOW, "exitCode": 143}, "left"),
        ({"phase": "Failed", "ended": NOW, "exitCode": 139}, "SIGSEGV"),
        ({"phase": "Failed", "ended": NOW, "exitCode": 255}, "failed (255)"),
        ({"phase": "Failed", "ended": NOW, "exitCode": None}, "ended"),
    ],
)
def test_what_a_pod_is_doing_is_a_word(changes: dict[str, Any], word: str) -> None:
    shown = Shown.of(snapshot(pods=[pod(0, "aaaaa", **changes)]))
    assert words.doing(shown.pods[0]).word == word
