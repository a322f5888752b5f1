"""Copies of a state that a spare node receives from rank 0."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # not listed in its __all__

import torchelastic
from torchelastic.protocol.worker import MEMORY, SPARE, WORKER_SOCKET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Spare:
    """A spare node that receives copies, in this process, and the checkpointer of the member that sends them.

    Attributes:
        store: the TCPStore of the round.
        member: the member's checkpointer.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.copies = folder / "spare" / MEMORY / "checkpoints"
        checkpointers = []
        for name in ("member", "spare"):
            (folder / name / MEMORY).mkdir(parents=True)
            monkeypatch.setenv(WORKER_SOCKET, f"{folder}/{name}/socket")
            checkpointers.append(torchelastic.Checkpointer(memory_every=1))
        self.member, self._spare = checkpointers
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", f"{self.store.port}")
        monkeypatch.setenv(SPARE, address := f"127.0.0.1:{self.store.port}")
        self.standing_by = threading.Thread(target=self._spare.stand_by, args=[address])
        self._monkeypatch = monkeypatch
        self.member.load()

    def save(self, step: int) -> Path:
        """Save a step on the member, and return the file of its copy there."""
        self.member.save(step, {"weight": torch.full((1000,), float(step))})
        self.member.wait()
        (file,) = self.copies.parents[2].glob(f"member/*/*/*-{step:09}-*.pt")
        return file

    def loaded(self) -> dict[str, Any] | None:
        """Return what the spare would continue with."""
        return self._spare.load()

    def end(self) -> None:
        """End the time as a spare."""
        self._monkeypatch.delenv(SPARE)
        if self.standing_by.ident is not None:
            self.standing_by.join()


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spare]:
    spare = Spare(tmp_path, monkeypatch)
    yield spare
    spare.end()


def eventually(is_true: Callable[[], object]) -> None:
    changed = threading.Event()
    while not is_true():
        changed.wait(0.01)


def test_a_spare_has_only_the_newest_copy(spare: Spare) -> None:
    spare.save(1)
    spare.standing_by.start()
    for step in (2, 3):
        spare.save(step)
        eventually(lambda step=step: [*spare.copies.glob(f"*-{step:09}-*.json")])
    eventually(lambda: len([*spare.copies.iterdir()]) == 2)
    torch.testing.assert_close(spare.loaded(), {"weight": torch.full((1000,), 3.0)})


def test_a_damaged_copy_is_a_warning_and_later_ones_are_received(
    spare: Spare, caplog: pytest.LogCaptureFixture
) -> None:
    file = spare.save(1)
    file.write_bytes(file.read_bytes()[::-1])
    spare.standing_by.start()
    eventually(lambda: "The copy of step 1 is not kept on this spare node: its SHA-256 is not" in caplog.text)
    spare.save(2)
    eventually(lambda: [*spare.copies.glob("*-000000002-*.json")])
    torch.testing.assert_close(spare.loaded(), {"weight": torch.full((1000,), 2.0)})


def test_a_stranger_without_the_secret_gets_nothing(spare: Spare) -> None:
    spare.save(1)
    spare.store.wait(["torchelastic/copies"])
    host, port, secret = spare.store.get("torchelastic/copies").decode().split()
    for line in (f"{secret[::-1]} 0 0\n", "\n", "é 0 0\n"):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(line.encode())
            assert stranger.recv(1) == b""
    with socket.create_connection((host, int(port))) as owner:
        owner.sendall(f"{secret} 0 0\n".encode())
        assert owner.recv(1) == b"{"
