"""The directory of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_operator.errors import BadInput
from elastic_operator.local.run_dir import create_run, home_dir, lock_name, reopen_run, replace_file

NOW = 1_700_000_000.0


def a_record(job: str) -> bytes:
    return b'{"manifest": {"metadata": {"name": "%s"}}}' % job.encode()


def test_variables_set_the_home_which_has_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert home_dir({"ELASTICJOB_HOME": "/a/b", "XDG_STATE_HOME": "/c"}) == Path("/a/b")
    assert home_dir({"XDG_STATE_HOME": "/c"}) == Path("/c/elasticjob")
    assert home_dir({}) == Path.home() / ".local" / "state" / "elasticjob"
    monkeypatch.chdir(tmp_path)
    assert home_dir({"ELASTICJOB_HOME": "runs"}) == tmp_path / "runs"
    with pytest.raises(BadInput, match="set ELASTICJOB_HOME to the full path of a folder"):
        home_dir({"ELASTICJOB_HOME": "~no-such-user/runs"})


def test_a_run_is_resumed_in_its_directory_and_its_old_logs_are_renamed(tmp_path: Path) -> None:
    run = create_run(tmp_path, "digits", NOW)
    assert run.path.stat().st_mode & 0o777 == 0o700  # no other user reads its logs
    replace_file(run.record, a_record("digits"))
    (run.logs / "digits-0-aaaaa").mkdir()
    (run.checkpoints / "digits").mkdir()
    with pytest.raises(BadInput, match="there is no run"):
        reopen_run(tmp_path, "../runs", "digits")
    for _ in range(2):
        assert reopen_run(tmp_path, run.run_id, "digits").path == run.path
    assert list(run.logs.iterdir()) == []
    assert (run.path / "logs.1" / "digits-0-aaaaa").is_dir()
    assert (run.path / "logs.2").is_dir()
    assert (run.checkpoints / "digits").is_dir()


def test_an_unwritable_home_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="ELASTICJOB_HOME"):
        create_run(tmp_path / "file", "digits", NOW)
    with pytest.raises(BadInput, match="ELASTICJOB_HOME"):
        lock_name(tmp_path / "file", "digits")
