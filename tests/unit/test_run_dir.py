"""The directory of a run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_operator.errors import BadInput
from elastic_operator.local.run_dir import create_run, home_dir, lock_name, reopen_run, replace_file

NOW = 1_700_000_000.0


def a_record(job: str) -> bytes:
    return b'{"manifest": {"metadata": {"name": "%s"}}}' % job.encode()


def test_the_home_is_the_named_one_or_in_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert home_dir({"ELASTICJOB_HOME": "/a/b", "XDG_STATE_HOME": "/c"}) == Path("/a/b")
    assert home_dir({"XDG_STATE_HOME": "/c"}) == Path("/c/elasticjob")
    assert home_dir({}) == Path.home() / ".local" / "state" / "elasticjob"
    monkeypatch.chdir(tmp_path)
    assert home_dir({"ELASTICJOB_HOME": "runs"}) == tmp_path / "runs"


def test_each_run_has_a_directory_of_its_own(tmp_path: Path) -> None:
    first, second = create_run(tmp_path, "digits", NOW), create_run(tmp_path, "digits", NOW)
    assert first.path != second.path
    assert first.run_id.startswith("digits-20231114-221320-")
    for job in ("letters", "digits"):
        replace_file(first.record, a_record(job))
    assert (record := first.read_record())
    assert record.name == "digits"
    assert sorted(path.name for path in first.path.iterdir()) == ["checkpoints", "job.json", "logs"]


def test_a_run_is_resumed_in_its_directory_and_its_old_logs_are_renamed(tmp_path: Path) -> None:
    run = create_run(tmp_path, "digits", NOW)
    replace_file(run.record, a_record("digits"))
    (run.logs / "digits-0-aaaaa").mkdir()
    (run.checkpoints / "digits").mkdir()
    for _ in range(2):
        assert reopen_run(tmp_path, run.run_id, "digits").path == run.path
    assert list(run.logs.iterdir()) == []
    assert (run.path / "logs.1" / "digits-0-aaaaa").is_dir()
    assert (run.path / "logs.2").is_dir()
    assert (run.checkpoints / "digits").is_dir()


def test_only_a_run_of_the_same_job_can_be_resumed(tmp_path: Path) -> None:
    run = create_run(tmp_path, "digits", NOW)
    replace_file(run.record, a_record("digits"))
    for run_id in ("digits-1", "", "../runs"):
        with pytest.raises(BadInput, match="there is no run"):
            reopen_run(tmp_path, run_id, "digits")
    for record, sentence in (
        (b"{}", "does not say which job"),
        (a_record("letters"), r"was of the job letters, but the manifest's metadata\.name is digits"),
    ):
        replace_file(run.record, record)
        with pytest.raises(BadInput, match=sentence):
            reopen_run(tmp_path, run.run_id, "digits")


HOLDS_IT = """
import sys
from pathlib import Path
from elastic_operator.local.run_dir import lock_name

with lock_name(Path(sys.argv[1]), "digits") as name:
    print("run digits-1", end="", file=name, flush=True)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_name_of_a_running_job_is_refused_until_the_run_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS_IT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        sentence = r"a job digits is running here already \(run digits-1\); .*`elasticjob delete digits`"
        with pytest.raises(BadInput, match=sentence):
            lock_name(tmp_path, "digits")
        lock_name(tmp_path, "letters").close()
        other.kill()
        assert other.wait() == -signal.SIGKILL
    with lock_name(tmp_path, "digits"), pytest.raises(BadInput, match="already; end it"):
        lock_name(tmp_path, "digits")
    lock_name(tmp_path, "digits").close()


def test_an_unwritable_home_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="ELASTICJOB_HOME"):
        create_run(tmp_path / "file", "digits", NOW)
    with pytest.raises(BadInput, match="ELASTICJOB_HOME"):
        lock_name(tmp_path / "file", "digits")
