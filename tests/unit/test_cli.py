from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import yaml

from elastic_operator import cli
from elastic_operator.commands.describe import description
from elastic_operator.commands.get import table
from elastic_operator.commands.output import OutputLost, lost
from elastic_operator.report_json import encode_report
from elastic_operator.showing.report_page import page
from elastic_operator.showing.shown import Shown
from tests.support.reports import long, report
from tests.support.snapshots import FOLDER, RUN, START, pod, snapshot

if TYPE_CHECKING:
    from pathlib import Path

NOW = START + 72
EVERY_COMMAND = (*("run", "get", "describe", "top", "scale", "suspend", "resume", "logs", "report", "delete", "demo"),)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELASTICJOB_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def finished(home: Path) -> Path:
    """A run that is over, as its folder tells it."""
    folder = home / "runs" / RUN
    end = {"how": "succeeded", "exitCode": 0, "message": "", "time": NOW}
    run = {"ended": end, "directory": str(folder), "logs": str(folder / "logs"), "alive": True}
    output = folder / "logs" / "digits-0-aaaaa" / "epoch_4" / "rank_0"
    output.mkdir(parents=True)
    (output / "output.log").write_text("test accuracy 0.973\n")
    (folder / "job.json").write_text(json.dumps(snapshot(status={"state": "Succeeded"}, run=run)))
    return folder


def run(*argv: str) -> int:
    try:
        return cli.main(argv)
    except SystemExit as end:
        return int(end.code or 0)


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    text = capsys.readouterr().out
    for command in (*EVERY_COMMAND, "version"):
        assert f"\n    {command} " in text


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_every_command_explains_itself_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    text = capsys.readouterr().out
    assert "example" in text
    assert f"elasticjob {command}" in text
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize(
    "argv",
    [
        ["fly"],
        ["scale", "digits"],
        ["scale", "digits", "--replicas", "many"],
        ["logs", "digits", "--rank", "-1"],
        ["get", "-o", "xml"],
        ["run"],
        ["run", "--no-such", "x.yaml"],
    ],
)
def test_a_wrong_command_line_gets_one_sentence_and_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("elasticjob: ")
    assert captured.err.count("\n") == 1
    assert "--help" in captured.err


@pytest.mark.parametrize("command", [["run"], ["demo"], ["run", "--plain"]])
def test_a_manifest_that_is_not_there_is_bad_input(
    command: list[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command, str(home / "none.yaml")) == 2
    error = capsys.readouterr().err
    assert error == f"elasticjob: {home}/none.yaml: there is no such file; check the path\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["describe", "x"],
        ["get", "x"],
        ["logs", "x"],
        ["top", "x"],
        ["report", "x"],
        ["delete", "x"],
        ["scale", "x", "--replicas", "2"],
        ["suspend", "x"],
        ["resume", "x"],
    ],
)
@pytest.mark.usefixtures("home")
def test_a_job_that_is_not_there_gets_a_sentence(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("elasticjob: ")
    assert " x " in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.usefixtures("home")
def test_no_jobs_is_said_where_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("get") == 0
    assert capsys.readouterr().err == "elasticjob: no jobs here; start one with `elasticjob run FILE`\n"


@pytest.mark.usefixtures("finished")
def test_a_finished_job_is_listed_described_and_its_logs_printed(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run("get") == 0
    header, line = capfdbinary.readouterr().out.decode().splitlines()
    assert header.split() == ["NAME", "STATE", "READY", "MIN", "MAX", "RESTARTS", "AGE"]
    assert line.split()[:6] == ["digits", "Succeeded", "2/3", "2", "3", "1"]
    for name in ("digits", RUN):
        assert run("describe", name) == 0
        assert f"Run:           {RUN}\n" in capfdbinary.readouterr().out.decode()
    for argv in (["logs", "digits", "--rank", "0"], ["logs", "digits", "--rank", "0", "-f"]):
        assert run(*argv) == 0
        assert capfdbinary.readouterr().out == b"test accuracy 0.973\n"


def test_the_report_of_a_finished_job_is_written(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (finished / "report.json").write_bytes(encode_report(report()))
    elsewhere = finished / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for name in ("digits", RUN):
        assert run("report", name) == 0
        assert capfd.readouterr().out == "the report of digits is in digits-report.html\n"
    assert (elsewhere / "digits-report.html").read_text() == page(report())
    assert run("report", "digits", "-o", "-") == 0
    assert capfd.readouterr().out == page(report())
    assert run("report", "digits", "-o", str(elsewhere)) == 2
    assert capfd.readouterr().err == (
        f"elasticjob: cannot write {elsewhere}: Is a directory; name another file with -o\n"
    )


def test_a_report_into_a_file_without_a_name_is_refused(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (finished / "report.json").write_bytes(encode_report(report()))
    monkeypatch.chdir(finished)
    assert run("report", "digits", "-o", "") == 2
    assert capsys.readouterr().err == (
        "elasticjob: -o needs the name of a file, or - for the standard output; it is empty\n"
    )
    assert not [*finished.glob("*.html")]


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc/x", "a\\b\0c"])
def test_a_report_is_written_here_whatever_the_job_is_called_in_it(
    name: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finished / "report.json").write_bytes(encode_report(report(name=name)))
    monkeypatch.chdir(finished)
    before = {*tmp_path.parent.rglob("*.html")}
    assert run("report", "digits") == 0
    [made] = {*tmp_path.parent.rglob("*.html")} - before
    assert made.parent == finished


@pytest.mark.parametrize("kept", [None, b"{", b'{"job": 1}'])
def test_a_report_that_is_not_there_or_none_gets_a_sentence(
    kept: bytes | None, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kept is not None:
        (finished / "report.json").write_bytes(kept)
    assert run("report", "digits", "-o", "-") == (1 if kept is None else 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        "elasticjob: there is no report of digits" if kept is None else "elasticjob: not the"
    )
    assert captured.err.count("\n") == 1


@pytest.mark.usefixtures("finished")
def test_a_finished_job_is_shown_as_it_stood_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("top", "digits", "--once") == 0
    assert capsys.readouterr().out == "digits  Succeeded  1m12s\nepoch 4   world size 2   restarts 1 charged, 0 free\n"
    assert run("top") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["digits", "Succeeded"]


@pytest.mark.usefixtures("home")
def test_no_jobs_is_said_where_there_are_none_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("top") == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "elasticjob: no jobs here; start one with `elasticjob run FILE`\n")


@pytest.mark.usefixtures("finished")
def test_objects_are_given_as_kubectl_gives_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("get", "digits", "-o", "json") == 0
    one = json.loads(capsys.readouterr().out)
    assert (one["kind"], one["metadata"]["name"], one["status"]["state"]) == ("ElasticJob", "digits", "Succeeded")
    assert run("get", "-o", "yaml") == 0
    every = yaml.safe_load(capsys.readouterr().out)
    assert (every["kind"], every["items"]) == ("List", [one])


def test_agents_are_not_asked_for_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("logs", "digits", "--agent", "--rank", "0") == 2
    assert capsys.readouterr().err.startswith("elasticjob: an agent speaks for all ranks")


def test_a_wide_list_says_where_metrics_are_and_the_run_and_its_folder() -> None:
    header, line = table([Shown.of(snapshot())], NOW, wide=True)
    assert header.split()[-5:] == ["EPOCH", "WORLD", "METRICS", "RUN", "FOLDER"]
    assert line.split()[-5:] == ["4", "2", "127.0.0.1:9000,127.0.0.1:9001,127.0.0.1:9002", RUN, FOLDER]


def test_of_many_pods_a_wide_list_says_where_some_show_metrics_and_nothing_where_none_does() -> None:
    many = [pod(number, f"{number:05}") for number in range(5)] + [pod(5, "ended", ended=NOW, phase="Failed")]
    jobs = [Shown.of(snapshot(pods=pods)) for pods in (many, [pod(0, "aaaaa", metricsUrl=None)])]
    _, first, second = table(jobs, NOW, wide=True)
    assert first.split()[-3] == "127.0.0.1:9000,127.0.0.1:9001,127.0.0.1:9002+2"
    assert second.split()[-3] == "-"
    assert "METRICS" not in table(jobs[1:], NOW, wide=True)[0]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "Running"),
        ({"alive": False}, "Killed"),
        ({"alive": False, "ended": {"how": "interrupted", "exitCode": 130, "time": NOW}}, "Interrupted"),
        ({"alive": False, "ended": {"how": "badInput", "exitCode": 2, "time": NOW}}, "BadInput"),
    ],
)
def test_a_run_that_did_not_finish_is_called_what_it_is(changes: dict[str, object], state: str) -> None:
    assert table([Shown.of(snapshot(run=changes))], NOW)[1].split()[1] == state


def test_a_description_says_all_that_is_known() -> None:
    last_words = {"reason": "StoreUnavailable", "message": "etcd does not answer", "contract": 1}
    ended = pod(2, "ccccc", phase="Failed", ready=False, ended=NOW, exitCode=3, message=last_words, ranks=[])
    lines = description(Shown.of(snapshot(pods=[pod(0, "aaaaa"), ended])), NOW)
    assert f"Run:           {RUN} (process 48100)" in lines
    assert "Pods:          2 ready of 3 wanted, 3 there" in lines
    assert "Epoch:         4, world size 2" in lines
    assert "Last Failure:  rank 1 on digits-1-bbbbb was killed by SIGKILL" in lines
    assert f"Checkpoints:   {FOLDER}/checkpoints" in lines
    assert "Etcd:          127.0.0.1:40123 (process 48105)" in lines
    assert "  maxReplicas: 3" in lines
    assert "  Running   True     1m08s   Training   2 workers train in epoch 4." in lines
    assert "    Agent:    process 48200" in lines
    assert "    Ranks:    0" in lines
    assert f"    Logs:     {FOLDER}/logs/digits-0-aaaaa" in lines
    assert "    State:       failed (3)" in lines
    assert "    Last Words:  etcd does not answer" in lines
    assert "  Warning   4s      PodDied   digits-2-ccccc was killed by SIGKILL." in lines


def test_a_description_says_what_is_left_of_a_jobs_time_and_what_it_cost() -> None:
    status = {
        "freeRestarts": 4,
        "activeSince": "2023-11-14T22:13:20Z",
        "lastFailure": {"message": "rank 1 was killed by SIGKILL", "time": "2023-11-14T22:14:00Z"},
        "excludedNodes": ["node-3", "node-7"],
    }
    lines = description(Shown.of(snapshot(status=status, spec={"activeDeadlineSeconds": 3600})), NOW)
    assert "Restarts:        1 charged, 4 free" in lines
    assert "Pods Died:       1" in lines
    assert "Last Failure:    rank 1 was killed by SIGKILL (32s ago)" in lines
    assert "Deadline:        in 58m48s" in lines
    assert "Excluded Nodes:  node-3, node-7" in lines


def test_what_an_earlier_version_wrote_of_the_last_failure_is_told_too() -> None:
    lines = description(Shown.of(snapshot(status={"lastFailure": "rank 1 was killed"})), NOW)
    assert "Last Failure:  rank 1 was killed" in lines


@pytest.mark.usefixtures("finished")
def test_a_reader_that_goes_away_gets_no_traceback() -> None:
    script = "import sys; from elastic_operator.cli import main; sys.exit(main(['get', '-o', 'yaml']))"
    command = f'{sys.executable} -c "{script}" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.returncode in (0, 141)


def into(redirected: str, *argv: str, **environ: str) -> tuple[int, str]:
    """What a command gives back whose standard output is redirected so: its exit code and what it complains of."""
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirected}', "-", sys.executable, "-m", "elastic_operator.cli", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environ},
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ["get", "-o", "yaml"],
        ["describe", "digits"],
        ["top"],
        ["top", "digits"],
        ["logs", "digits", "--rank", "0"],
        ["logs", "digits", "--rank", "0", "-f"],
        ["report", "digits", "-o", "-"],
        ["version"],
        ["--help"],
        [],
    ],
)
def test_an_output_that_cannot_be_written_is_said_in_a_sentence(argv: list[str], finished: Path) -> None:
    (finished / "report.json").write_bytes(encode_report(long()))
    said = "elasticjob: cannot write the output: No space left on device; have it written elsewhere\n"
    for unbuffered in ("", "1"):
        assert into(">/dev/full", *argv, PYTHONUNBUFFERED=unbuffered) == (1, said)


@pytest.mark.usefixtures("finished")
def test_an_output_that_is_not_there_is_said_in_a_sentence() -> None:
    said = "elasticjob: cannot write the output: Bad file descriptor; have it written elsewhere\n"
    assert into(">&-", "get") == (1, said)


def test_that_a_job_cannot_say_what_it_does_is_told_as_such_from_within_its_tasks() -> None:
    within = ExceptionGroup("tasks", [ExceptionGroup("tasks", [OutputLost(errno.EIO, "Input/output error")])])
    assert (found := lost(within)) is not None
    assert found.strerror == "Input/output error"
    assert lost(ExceptionGroup("tasks", [OutputLost(errno.EIO, "x"), ValueError()])) is None
    assert lost(OSError(errno.ENOSPC, "of another file")) is None


def test_what_nobody_expected_comes_with_a_plea_to_report_it(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr("elastic_operator.local.client.known_jobs", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError) as error:
        run("get")
    assert "report" in "".join(error.value.__notes__)


def test_on_another_system_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert run("get") == 2
    assert "Linux" in capsys.readouterr().err


def test_the_command_is_there_at_once() -> None:
    """What makes it slow to start is imported only by the commands that need it."""
    slow = {"torch", "aiohttp", "kubernetes", "rich", "celpy", "watchfiles", "asyncio", "sklearn"}
    script = "import sys; from elastic_operator.cli import main; main(['get']); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert slow.isdisjoint(done.stdout.split())
