"""``elasticjob`` on this machine: its command line, its output and its errors."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import yaml

from elastic_operator.api.status import encode_report
from elastic_operator.cli import main as cli
from elastic_operator.reports.page import page
from elastic_operator.views.formatting import table
from tests.support.cluster_objects import START
from tests.support.local_runs import manifest
from tests.support.reports import long, report
from tests.support.snapshots import FOLDER, RUN, snapshot, view

if TYPE_CHECKING:
    from pathlib import Path

NOW = START + 72
EVERY_COMMAND = (*("run", "get", "describe", "top", "scale", "suspend", "resume", "logs", "report", "delete", "demo"),)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELASTICJOB_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def finished(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that has ended; it is the current directory."""
    folder = home / "runs" / RUN
    end = {"how": "succeeded", "exitCode": 0, "message": "", "time": NOW}
    run = {"ended": end, "directory": str(folder), "logs": str(folder / "logs"), "alive": True}
    output = folder / "logs" / "digits-0-aaaaa" / "round_4" / "rank_0"
    output.mkdir(parents=True)
    (output / "output.log").write_text("test accuracy 0.973\n")
    (folder / "job.json").write_text(json.dumps(snapshot(status={"state": "Succeeded"}, run=run)))
    monkeypatch.chdir(folder)
    return folder


def run(*argv: str) -> int:
    try:
        return cli.main(argv)
    except SystemExit as end:
        return int(end.code or 0)


def the_one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one sentence that a command prints instead of an answer."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("elasticjob: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("elasticjob: ").strip()


# -- the command line


def test_every_command_has_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    whole = capsys.readouterr().out
    for command in EVERY_COMMAND:
        assert f"\n    {command} " in whole
        assert run(command, "--help") == 0
        text = capsys.readouterr().out
        assert "example" in text
        assert f"elasticjob {command}" in text
        assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize(
    "argv",
    [
        *(["fly"], ["scale", "digits"], ["scale", "digits", "--replicas", "many"]),
        *(["get", "-o", "xml"], ["run"], ["run", "--no-such", "x.yaml"], ["logs", "digits", "--agent", "--rank", "0"]),
    ],
    ids=" ".join,
)
def test_an_invalid_command_line_is_reported_in_one_sentence_and_exits_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) == 2
    assert ("an agent's log is about all ranks" if "--agent" in argv else "--help") in the_one_sentence(capsys)


@pytest.mark.parametrize("rank", ["a", "-1", "1.5"])
def test_an_invalid_number_is_named_with_its_flag(rank: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("logs", "digits", f"--rank={rank}") == 2
    expected = f"argument --rank: '{rank}' is not a non-negative integer; see `elasticjob logs --help`"
    assert the_one_sentence(capsys) == expected


def test_an_invalid_number_of_spares_is_reported_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", "--spares=10001", str(manifest(tmp_path))) == 2
    assert the_one_sentence(capsys) == "spec.spares: 10001 is greater than the maximum of 10000"
    assert run("run", str(manifest(tmp_path, spares=-1))) == 2
    assert the_one_sentence(capsys).endswith("spec.spares: -1 is less than the minimum of 0")


@pytest.mark.parametrize("command", [["run"], ["demo"], ["run", "--plain"]], ids=" ".join)
def test_a_missing_manifest_is_bad_input(command: list[str], home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command, str(home / "none.yaml")) == 2
    assert the_one_sentence(capsys) == f"{home}/none.yaml: there is no such file; check the path"


@pytest.mark.parametrize(
    "argv",
    [
        *(["describe", "x"], ["get", "x"], ["logs", "x"], ["top", "x"], ["report", "x"], ["delete", "x"]),
        *(["scale", "x", "--replicas", "2"], ["suspend", "x"], ["resume", "x"]),
    ],
    ids=" ".join,
)
def test_a_missing_job_is_reported_in_one_sentence(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 1
    assert " x " in the_one_sentence(capsys)


@pytest.mark.parametrize("command", ["get", "top"])
def test_an_empty_list_says_how_to_start_a_job(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command) == 0
    assert the_one_sentence(capsys) == "no jobs on this machine; start one with `elasticjob run FILE`"


def test_an_unexpected_error_asks_for_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_operator.client.local.LocalJobs.jobs", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError) as error:
        run("get")
    assert "report" in "".join(error.value.__notes__)


def test_heavy_modules_are_not_imported_at_start() -> None:
    slow = {"torch", "aiohttp", "kubernetes", "rich", "celpy", "watchfiles", "asyncio", "sklearn", "jinja2"}
    script = "import sys; from elastic_operator.cli.main import main; main(['get']); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert slow.isdisjoint(done.stdout.split())


# -- a job that has ended


@pytest.mark.usefixtures("finished")
def test_a_finished_job_is_listed_described_and_its_logs_printed(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("get") == 0
    header, line = capfd.readouterr().out.splitlines()
    assert header.split() == ["NAME", "STATE", "READY", "MIN", "MAX", "RESTARTS", "AGE"]
    assert line.split()[:6] == ["digits", "Succeeded", "2/3", "2", "3", "1"]
    for name in ("digits", RUN):
        assert run("describe", name) == 0
        assert f"Run:           {RUN}\n" in capfd.readouterr().out
    for argv in (["logs", "digits", "--rank", "0"], ["logs", "digits", "--rank", "0", "-f"]):
        assert run(*argv) == 0
        assert capfd.readouterr().out == "test accuracy 0.973\n"
    assert run("top", "digits", "--once") == 0
    assert (
        capfd.readouterr().out == "digits  Succeeded  1m12s\nround 4   world size 2   restarts 1 charged, 0 uncharged\n"
    )
    assert run("top") == 0
    assert capfd.readouterr().out.splitlines()[1].split()[:2] == ["digits", "Succeeded"]


@pytest.mark.usefixtures("finished")
def test_jobs_are_printed_as_json_and_yaml_in_the_form_of_kubectl(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("get", "digits", "-o", "json") == 0
    one = json.loads(capsys.readouterr().out)
    assert (one["kind"], one["metadata"]["name"], one["status"]["state"]) == ("ElasticJob", "digits", "Succeeded")
    assert run("get", "-o", "yaml") == 0
    every = yaml.safe_load(capsys.readouterr().out)
    assert (every["kind"], every["items"]) == ("List", [one])


def test_the_report_of_a_finished_job_is_written(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (finished / "report.json").write_bytes(encode_report(report()))
    for name in ("digits", RUN):
        assert run("report", name) == 0
        assert capfd.readouterr().out == "the report of digits is in digits-report.html\n"
    assert (finished / "digits-report.html").read_text() == page(report())
    assert run("report", "digits", "-o", "-") == 0
    assert capfd.readouterr().out == page(report())


def test_an_invalid_file_for_a_report_is_bad_input(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (finished / "report.json").write_bytes(encode_report(report()))
    assert run("report", "digits", "-o", "logs") == 2
    assert the_one_sentence(capsys) == "cannot write logs: Is a directory; name another file with -o"


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc/x", "a\\b\0c"])
def test_a_report_is_written_to_the_current_directory_whatever_its_name(
    name: str, finished: Path, tmp_path: Path
) -> None:
    (finished / "report.json").write_bytes(encode_report(report(name=name)))
    before = {*tmp_path.parent.rglob("*.html")}
    assert run("report", "digits") == 0
    [made] = {*tmp_path.parent.rglob("*.html")} - before
    assert made.parent == finished


@pytest.mark.parametrize("kept", [None, b"{", b'{"job": 1}'])
def test_a_missing_or_invalid_report_is_reported_in_one_sentence(
    kept: bytes | None, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kept is not None:
        (finished / "report.json").write_bytes(kept)
    assert run("report", "digits", "-o", "-") == (1 if kept is None else 2)
    assert the_one_sentence(capsys).startswith("there is no report of digits" if kept is None else "not the")


# -- the table and the description


def test_a_wide_list_has_the_run_and_its_folder() -> None:
    header, line = table([view()], NOW, wide=True)
    assert header.split()[-5:] == ["ROUND", "WORLD", "SPARES", "RUN", "FOLDER"]
    assert line.split()[-5:] == ["4", "2", "0", RUN, FOLDER]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "Running"),
        ({"alive": False}, "Killed"),
        ({"alive": False, "ended": {"how": "interrupted", "exitCode": 130, "time": NOW}}, "Interrupted"),
        ({"alive": False, "ended": {"how": "badInput", "exitCode": 2, "time": NOW}}, "BadInput"),
    ],
)
def test_a_list_shows_whether_a_run_is_alive_or_how_it_ended(changes: dict[str, object], state: str) -> None:
    assert table([view(run=changes)], NOW)[1].split()[1] == state


# -- an output that cannot be written


def redirected(redirection: str, *argv: str) -> tuple[int, str]:
    """Run a command with its standard output redirected; return its exit code and its standard error."""
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirection}', "-", sys.executable, "-m", "elastic_operator.cli.main", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.usefixtures("finished")
def test_a_closed_pipe_causes_no_traceback() -> None:
    code, errors = redirected("| true; exit ${PIPESTATUS[0]}", "get", "-o", "yaml")
    assert errors == ""
    assert code in (0, 141)


@pytest.mark.parametrize("argv", [["get", "-o", "yaml"], ["report", "digits", "-o", "-"], ["--help"]], ids=" ".join)
def test_an_output_that_cannot_be_written_is_reported_in_one_sentence(
    argv: list[str], finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    (finished / "report.json").write_bytes(encode_report(long()))
    sentence = "elasticjob: cannot write the output: {}; redirect it elsewhere\n"
    assert redirected(">/dev/full", *argv) == (1, sentence.format("No space left on device"))
    assert redirected(">&-", *argv) == (1, sentence.format("Bad file descriptor"))


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 1), (errno.EPIPE, 141)])
def test_an_output_that_cannot_be_written_by_a_task_causes_no_traceback(
    monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    async def run() -> int:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write())
        return 0

    async def write() -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("elastic_operator.cli.main._main", lambda _: asyncio.run(run()))
    monkeypatch.setattr("elastic_operator.cli.main._discard_output", lambda: None)
    assert cli.main([]) == code


def test_run_starts_its_first_processes_before_it_imports_an_http_library() -> None:
    program = "import sys, elastic_operator.cli.run; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
