from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic_operator.errors import BadInput, NotFound
from elastic_operator.local.run_folder import (
    RunFolder,
    all_runs,
    create_run,
    find_run,
    home_folder,
    private_folder,
    reopen_run,
)

NOW = 1_700_000_000.0


def a_record(job: str) -> dict[str, object]:
    return {"manifest": {"metadata": {"name": job}}}


def test_the_home_folder_is_the_one_that_is_named_or_lies_below_the_state_folder() -> None:
    assert home_folder({"ELASTICJOB_HOME": "/a/b", "XDG_STATE_HOME": "/c"}) == Path("/a/b")
    assert home_folder({"XDG_STATE_HOME": "/c"}) == Path("/c/elasticjob")
    assert home_folder({}) == Path.home() / ".local" / "state" / "elasticjob"


def test_a_relative_home_folder_does_not_move_with_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert home_folder({"ELASTICJOB_HOME": "runs"}) == tmp_path / "runs"


def test_two_runs_of_one_job_in_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    first, second = create_run(tmp_path, "digits", NOW), create_run(tmp_path, "digits", NOW)
    assert first.path != second.path
    assert first.run_id.startswith("digits-20231114-221320-")
    assert first.logs.is_dir()
    assert first.checkpoint("digits", 1) == first.path / "checkpoints" / "digits" / "1"


def test_a_record_is_read_as_it_was_written_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    folder = create_run(tmp_path, "digits", NOW)
    folder.write_record({"a": 1})
    folder.write_record({"a": 2})
    assert folder.read_record() == {"a": 2}
    assert sorted(path.name for path in folder.path.iterdir()) == ["checkpoints", "job.json", "logs"]


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff"])
def test_a_record_that_cannot_be_understood_counts_as_none(tmp_path: Path, text: str) -> None:
    folder = create_run(tmp_path, "digits", NOW)
    folder.record.write_bytes(text.encode(errors="surrogateescape"))
    assert folder.read_record() is None


def test_runs_are_listed_with_the_latest_first(tmp_path: Path) -> None:
    old, new, empty = (create_run(tmp_path, name, NOW) for name in ("old", "new", "empty"))
    for age, folder in ((60, old), (0, new)):
        folder.write_record(a_record("x"))
        os.utime(folder.record, (NOW - age, NOW - age))
    assert all_runs(tmp_path) == (new, old)
    assert find_run(tmp_path, old.run_id) == old
    with pytest.raises(NotFound, match=empty.run_id):
        find_run(tmp_path, empty.run_id)


def test_where_there_is_no_home_folder_there_are_no_runs(tmp_path: Path) -> None:
    assert all_runs(tmp_path / "nowhere") == ()


def test_a_run_is_resumed_in_its_folder_with_the_old_logs_put_aside(tmp_path: Path) -> None:
    folder = create_run(tmp_path, "digits", NOW)
    folder.write_record(a_record("digits"))
    (folder.logs / "digits-0-aaaaa").mkdir()
    (folder.checkpoints / "digits").mkdir()
    assert reopen_run(tmp_path, folder.run_id, "digits") == folder
    assert reopen_run(tmp_path, folder.run_id, "digits") == folder
    assert list(folder.logs.iterdir()) == []
    assert (folder.path / "logs.1" / "digits-0-aaaaa").is_dir()
    assert (folder.path / "logs.2").is_dir()
    assert (folder.checkpoints / "digits").is_dir()


@pytest.mark.parametrize("run_id", ["digits-1", "", ".", "..", "../runs", "/", "a/b"])
def test_what_is_no_run_cannot_be_resumed(tmp_path: Path, run_id: str) -> None:
    create_run(tmp_path, "digits", NOW).write_record(a_record("digits"))
    with pytest.raises(BadInput, match="there is no run"):
        reopen_run(tmp_path, run_id, "digits")


def test_a_run_of_another_job_or_of_an_unknown_one_cannot_be_resumed(tmp_path: Path) -> None:
    folder = create_run(tmp_path, "digits", NOW)
    with pytest.raises(BadInput, match="does not say of which job"):
        reopen_run(tmp_path, folder.run_id, "digits")
    folder.write_record(a_record("letters"))
    with pytest.raises(BadInput, match=r"was of the job letters, but the manifest's metadata\.name is digits"):
        reopen_run(tmp_path, folder.run_id, "digits")


def test_a_home_folder_that_cannot_be_written_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="ELASTICJOB_HOME"):
        create_run(tmp_path / "file", "digits", NOW)


def test_the_manifest_is_kept_in_the_order_in_which_it_was_written(tmp_path: Path) -> None:
    folder = create_run(tmp_path, "digits", NOW)
    folder.write_manifest({"kind": "ElasticJob", "apiVersion": "v1"})
    assert folder.manifest.read_text() == "kind: ElasticJob\napiVersion: v1\n"


def test_the_private_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = private_folder({"XDG_RUNTIME_DIR": str(tmp_path)}, "1.sock")
    assert folder == tmp_path / "elasticjob"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder({"XDG_RUNTIME_DIR": str(tmp_path)}, "1.sock") == folder


@pytest.mark.parametrize("spoil", ["open to others", "a link", "a file", "too long", "missing"])
def test_a_folder_that_others_could_reach_or_that_does_not_fit_is_passed_over(tmp_path: Path, spoil: str) -> None:
    runtime = tmp_path / ("x" * 90 if spoil == "too long" else "run")
    candidate = runtime / "elasticjob"
    if spoil != "missing":
        runtime.mkdir()
    if spoil == "open to others":
        candidate.mkdir()
        candidate.chmod(0o755)
    elif spoil == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        candidate.symlink_to(tmp_path / "elsewhere")
    elif spoil == "a file":
        candidate.touch()
    chosen = private_folder({"XDG_RUNTIME_DIR": str(runtime)}, "12345678.sock")
    assert chosen != candidate
    assert len(str(chosen / "12345678.sock")) <= 107


def test_a_record_says_nothing_of_a_run_without_a_folder(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "gone").read_record() is None
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "stray").write_text(json.dumps({}))
    assert all_runs(tmp_path) == ()
