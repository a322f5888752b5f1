"""Checkpoints in folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    manager = FileSystemCheckpointManager(tmp_path, keep=2)
    for number in range(4):
        checkpoint = manager.create_checkpoint()
        with checkpoint.open_output_stream("state") as stream:
            stream.write(b"%d" % number)
        checkpoint.commit()
    assert manager.list_checkpoints() == ["3", "4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    latest = manager.get_latest_checkpoint()
    assert latest is not None
    with latest.open_input_stream("state") as stream:
        assert stream.read() == b"3"


def test_keeping_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="keep=0 would delete every checkpoint"):
        FileSystemCheckpointManager(tmp_path, keep=0)
