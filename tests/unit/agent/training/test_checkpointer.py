"""Checkpoints of a training in one process."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import os
import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch

import torchelastic
from torchelastic.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "model": {"weight": torch.full((1000,), float(step))}}


def start(folder: Path | str, **settings: Any) -> tuple[torchelastic.Checkpointer, int | None]:
    """Start a training, and return its checkpointer and the step at which it continues."""
    checkpointer = torchelastic.Checkpointer(folder, **settings)
    state = checkpointer.load()
    if state is None:
        return checkpointer, None
    torch.testing.assert_close(state["model"]["weight"], torch.full((1000,), float(state["step"])))
    return checkpointer, state["step"]


def saved(folder: Path | str, *steps: int, **settings: Any) -> torchelastic.Checkpointer:
    """Start a training, and save these steps."""
    checkpointer, _ = start(folder, **settings)
    for step in steps:
        assert checkpointer.save(step, state_of(step))
        checkpointer.wait()
    return checkpointer


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{tmp_path}" if request.param == "memory" else str(tmp_path)


def test_a_training_continues_from_the_last_checkpoint(place: str) -> None:
    first, step = start(place)
    assert step is None
    with first:
        first.save(1, state_of(1))
    assert start(place)[1] == 1
    saved(place, 2, 3)
    assert start(place)[1] == 3


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    saved(tmp_path, 3, 4, 5, keep=3)
    assert {path.name for path in tmp_path.iterdir()} == {"token-2"} | {
        f"checkpoint-000002-00000000{step}-0000.{suffix}" for step in (3, 4, 5) for suffix in ("pt", "json")
    }


def file(folder: Path, step: int, suffix: str) -> Path:
    (path,) = folder.glob(f"checkpoint-*-{step:09}-*.{suffix}")
    return path


DAMAGES: dict[str, Callable[[Path], object]] = {
    "bytes": lambda folder: os.truncate(file(folder, 2, "pt"), 1000),
    "No such file": lambda folder: file(folder, 2, "pt").unlink(),
    "malformed": lambda folder: file(folder, 2, "json").write_bytes(b'{"token":'),
    "Invalid enum value 2": lambda folder: file(folder, 2, "json").write_text(
        file(folder, 2, "json").read_text().replace('"version":1', '"version":2')
    ),
    "SHA-256": lambda folder: file(folder, 2, "pt").write_bytes(file(folder, 2, "pt").read_bytes()[:-1] + b"x"),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_loaded(
    tmp_path: Path, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2)
    DAMAGES[said](tmp_path)
    assert start(tmp_path)[1] == 1
    (warning,) = caplog.messages
    assert "000000002-0000.pt cannot be loaded: " in warning
    assert said in warning
    # The damaged checkpoint is the first that is deleted.
    saved(tmp_path, 3)
    assert {path.name.split("-")[2] for path in tmp_path.glob("*.json")} == {"000000001", "000000003"}


def test_a_training_does_not_begin_again_if_all_its_checkpoints_are_damaged(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    for path in tmp_path.glob("*.pt"):
        path.write_bytes(b"")
    with pytest.raises(torchelastic.NonRetryableException, match=r"it has 0 bytes.* move the checkpoints"):
        start(tmp_path)


@contextlib.contextmanager
def unwritable(cause: int) -> Iterator[None]:
    """Let each write of a checkpoint fail with an error number within the block.

    Few machines have a file system with quotas, so fsync(), in which NFS reports them, stands for one.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        if cause == errno.EFBIG:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))  # the state has 4,000 bytes
        else:
            patch.setattr(os, "fsync", Mock(side_effect=OSError(cause, os.strerror(cause))))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_training_goes_on_when_checkpoints_cannot_be_written_and_each_new_cause_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = saved(tmp_path, 1)
    quota = errno.EDQUOT
    causes = {2: errno.EFBIG, 3: errno.EFBIG, 4: quota, 5: quota, 6: None, 7: quota, 8: quota}
    for step, cause in causes.items():
        before = set(tmp_path.iterdir())
        with unwritable(cause) if cause else contextlib.nullcontext():
            assert checkpointer.save(step, state_of(step), force=step == 8)
            checkpointer.wait()
        assert (set(tmp_path.iterdir()) == before) == bool(cause)
        assert start(tmp_path)[1] == (1 if step < 6 else 6)
    assert caplog.messages == [
        f"The checkpoint of step {step} was not written to {tmp_path}, and training continues "
        f"(the same warning is not repeated at each checkpoint): [Errno {cause}] {os.strerror(cause)}"
        for step, cause in ((2, errno.EFBIG), (4, quota), (7, quota), (8, quota))
    ]


def test_training_goes_on_without_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    checkpointer, step = start(tmp_path / "file")
    assert step is None
    with checkpointer:
        assert checkpointer.save(1, state_of(1))
    assert len(caplog.messages) == 2
    assert all(f"written to {tmp_path}/file, and training continues" in message for message in caplog.messages)


@pytest.mark.parametrize("before", [(), (1, 2)])
def test_a_writer_that_outlives_its_round_does_not_write_the_newest_checkpoint(
    place: str, before: tuple[int, ...]
) -> None:
    saved(place, *before)
    outlived, later = start(place)[0], start(place)[0]
    for checkpointer, step in ((outlived, 3), (later, 4), (outlived, 50), (outlived, 60)):
        checkpointer.save(step, state_of(step))
        checkpointer.wait()
    assert start(place)[1] == 4


def test_a_later_round_has_a_higher_token_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ROUND", "7")
    saved(tmp_path, 1)
    assert file(tmp_path, 1, "json").name.startswith("checkpoint-000007-")


def test_the_remains_of_a_killed_writer_are_deleted(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    remains = [tmp_path / f"{name}-0000.pt" for name in (".partial-checkpoint-1-9", "checkpoint-1-9")]
    for path in (*remains, other := tmp_path / "notes.pt"):
        path.touch()
    saved(tmp_path, 2)
    assert not any(path.exists() for path in remains)
    assert other.exists()


def test_a_checkpoint_does_not_change_with_the_tensors(tmp_path: Path) -> None:
    checkpointer, _ = start(tmp_path)
    state = state_of(1)
    state["list"] = [weight := state["model"]["weight"]]
    checkpointer.save(1, state)
    weight.fill_(2)
    state["step"] = 2
    checkpointer.close()
    assert start(tmp_path)[1] == 1


def test_a_checkpoint_is_due_after_a_number_of_steps(tmp_path: Path) -> None:
    checkpointer, _ = start(tmp_path, every=10)
    assert not checkpointer.save(9, state_of(9))
    assert checkpointer.save(12, state_of(12))
    assert not checkpointer.save(21, state_of(21))
    assert checkpointer.save(21, state_of(21), force=True)
    assert not checkpointer.save(21, state_of(21), force=True)
    checkpointer.close()
    checkpointer, _ = start(tmp_path, every=10)
    assert not checkpointer.save(30, state_of(30))


def test_a_training_that_returns_to_a_checkpoint_saves_the_same_steps_again(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path, 1, 2)
    file(tmp_path, 2, "pt").write_bytes(b"")
    state = checkpointer.load()
    assert state is not None
    assert state["step"] == 1
    assert checkpointer.save(2, state_of(2))
    checkpointer.close()
    assert start(tmp_path)[1] == 2


def test_a_checkpoint_is_due_after_a_time(tmp_path: Path) -> None:
    rarely, _ = start(tmp_path, every=dt.timedelta(days=1))
    assert not rarely.save(1, state_of(1))
    often, _ = start(tmp_path, every=dt.timedelta(microseconds=1))
    assert often.save(1, state_of(1))
    often.close()


def test_training_does_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer, _ = start(tmp_path)
    written = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: written.wait())
    assert checkpointer.save(1, state_of(1))
    assert not checkpointer.save(2, state_of(2))
    written.set()
    checkpointer.wait()
    assert checkpointer.save(3, state_of(3))
    checkpointer.close()


def test_the_folders_of_a_jobs_pods_on_a_shared_volume_count_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "job/0", 1, 2)
    saved(tmp_path / "job/2", 3)
    saved(tmp_path / "job/notes", 4)
    monkeypatch.setenv("TORCHELASTIC_CHECKPOINT_DIR", str(tmp_path / "job/1"))
    checkpointer = torchelastic.Checkpointer(keep=1)
    state = checkpointer.load()
    assert state is not None
    assert state["step"] == 3
    checkpointer.save(4, state)
    checkpointer.close()
    assert {path.parent.name for path in tmp_path.rglob("*.pt")} == {"1", "notes"}
    # A folder that the program names is not a pod's.
    assert start(tmp_path / "job/0")[1] is None


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about its sparse tensors
def test_sparse_and_quantized_tensors_are_saved(tmp_path: Path) -> None:
    dense = torch.eye(3)
    state = {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(dense, 0.5, 0, torch.qint8),
    }
    checkpointer, _ = start(tmp_path)
    checkpointer.save(1, state)
    checkpointer.close()
    loaded = torchelastic.Checkpointer(tmp_path).load()
    assert loaded is not None
    assert [loaded["coo"].layout, loaded["csr"].layout] == [torch.sparse_coo, torch.sparse_csr]
    assert all(torch.equal(loaded[name].to_dense(), dense) for name in ("coo", "csr"))
    assert torch.equal(loaded["quantized"].dequantize(), dense)


class Subclass(torch.Tensor):
    """Stands for a tensor whose content is not known."""


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Subclass(), r"state\['model'\]\[0\] is a Subclass: save .* with torch.distributed.checkpoint"),
        (Path(), r"state\['model'\]\[0\] is a PosixPath, which a checkpoint cannot contain"),
        ({(1, 2): 1}, r"state\['model'\]\[0\] has the key \(1, 2\)"),
    ],
)
def test_a_state_that_could_not_be_loaded_is_refused(tmp_path: Path, value: object, said: str) -> None:
    checkpointer, _ = start(tmp_path)
    with pytest.raises(TypeError, match=said):
        checkpointer.save(1, {"model": [value]})


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_CHECKPOINT_DIR", raising=False)
    with pytest.raises(SettingsError, match=r"There is no folder .*TORCHELASTIC_CHECKPOINT_DIR"):
        torchelastic.Checkpointer()
    with pytest.raises(SettingsError, match="keep=0 would delete every checkpoint"):
        torchelastic.Checkpointer(tmp_path, keep=0)
    for every in (0, dt.timedelta()):
        with pytest.raises(SettingsError, match=r"every=0\S* is not positive"):
            torchelastic.Checkpointer(tmp_path, every=every)
        with pytest.raises(SettingsError, match=r"memory_every=0\S* is not positive"):
            torchelastic.Checkpointer(memory_every=every)
    checkpointer = torchelastic.Checkpointer(tmp_path)
    with pytest.raises(RuntimeError, match=r"Call load\(\) before save\(\)"):
        checkpointer.save(1, {})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match=r"call init_process_group\(\) before load\(\)"):
        checkpointer.load()
