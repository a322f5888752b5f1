"""Copies of a state that a spare node receives from rank 0."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # not listed in its __all__

import torchelastic
from tests.support.tcp_proxy import TcpProxy
from torchelastic.protocol.worker import MEMORY, SPARE, WORKER_SOCKET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


SERVER = "torchelastic/copies"

STANDS_BY = """
import os
import torchelastic
torchelastic.Checkpointer(memory_every=1).stand_by(os.environ["TORCHELASTIC_SPARE"])
"""


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
        self._standing_by = threading.Thread(target=lambda: self._spare.stand_by(os.environ[SPARE]))
        self._monkeypatch = monkeypatch
        self.member.load()

    def save(self, step: int) -> Path:
        """Save a step on the member, and return the file of its copy there."""
        self.member.save(step, {"weight": torch.full((1000,), float(step))})
        self.member.wait()
        (file,) = self.copies.parents[2].glob(f"member/*/*/*-{step:09}-*.pt")
        return file

    def begin(self, address: str = "") -> None:
        """Begin the time as a spare, with the address of the TCPStore or of a proxy before it."""
        self._monkeypatch.setenv(SPARE, address or f"127.0.0.1:{self.store.port}")
        self._standing_by.start()

    def server(self) -> tuple[str, int, str]:
        """Return the host, the port and the secret of the member that sends copies."""
        self.store.wait([SERVER])
        host, port, secret = self.store.get(SERVER).decode().split()
        return host, int(port), secret

    def has(self, step: int, folder: str = "spare") -> bool:
        """Return whether a spare has the copy of a step."""
        return any(self.copies.parents[2].glob(f"{folder}/*/*/checkpoint-*-{step:09}-*.json"))

    def loaded(self) -> dict[str, Any] | None:
        """Return what the spare would continue with."""
        return self._spare.load()

    def end(self) -> None:
        """End the time as a spare."""
        self._monkeypatch.delenv(SPARE, raising=False)
        if self._standing_by.ident is not None:
            self._standing_by.join()


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
    spare.begin()
    for step in (2, 3):
        spare.save(step)
        eventually(lambda step=step: spare.has(step))
    eventually(lambda: len([*spare.copies.iterdir()]) == 2)
    torch.testing.assert_close(spare.loaded(), {"weight": torch.full((1000,), 3.0)})


def test_a_damaged_copy_is_a_warning_and_later_ones_are_received(
    spare: Spare, caplog: pytest.LogCaptureFixture
) -> None:
    file = spare.save(1)
    file.write_bytes(file.read_bytes()[::-1])
    spare.begin()
    eventually(lambda: f"step 1 is not kept on this spare node in {spare.copies}: its SHA-256 is not" in caplog.text)
    spare.save(2)
    eventually(lambda: spare.has(2))
    torch.testing.assert_close(spare.loaded(), {"weight": torch.full((1000,), 2.0)})


def test_a_spare_that_cannot_keep_copies_says_so_once(spare: Spare, caplog: pytest.LogCaptureFixture) -> None:
    spare.copies.touch()  # a file in the place of the folder
    spare.save(1)
    host, port, secret = spare.server()
    with socket.create_server(("127.0.0.1", 0)) as between:
        spare.store.set(SERVER, f"127.0.0.1 {between.getsockname()[1]} {secret}")
        spare.begin()
        tried = 0
        while tried < 2:
            connection, _ = between.accept()
            with connection, socket.create_connection((host, port)) as server:
                request = connection.recv(4096)
                tried = int(request.split()[2])  # the newest copy that the spare has tried to keep
                spare.member.save(tried + 1, {"weight": torch.zeros(1000)})
                spare.member.wait()
                server.sendall(request)
                connection.sendall(b"".join(iter(lambda: server.recv(2**20), b"")))
    assert caplog.text.count("is not kept on this spare node") == 1


def test_a_stranger_without_the_secret_gets_nothing(spare: Spare) -> None:
    spare.save(1)
    host, port, secret = spare.server()
    for line in (f"{secret[::-1]} 0 0\n", "\n", "é 0 0\n"):
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(line.encode())
            assert stranger.recv(1) == b""
    with socket.create_connection((host, port)) as owner:
        owner.sendall(f"{secret} 0 0\n".encode())
        assert owner.recv(1) == b"{"


def test_a_copy_that_is_cut_leaves_the_older_one_and_is_asked_for_again(spare: Spare) -> None:
    spare.save(1)
    spare.begin()
    eventually(lambda: spare.has(1))
    host, port, secret = spare.server()
    with socket.create_server(("127.0.0.1", 0)) as between:
        spare.store.set(SERVER, f"127.0.0.1 {between.getsockname()[1]} {secret}")
        spare.save(2)
        requests = []
        for part in (0.5, 1.0):
            connection, _ = between.accept()
            assert spare.has(1)
            assert not spare.has(2)
            with connection, socket.create_connection((host, port)) as server:
                requests.append(connection.recv(4096))
                server.sendall(requests[-1])
                answer = b"".join(iter(lambda: server.recv(2**20), b""))
                connection.sendall(answer[: int(len(answer) * part)])
        eventually(lambda: spare.has(2))
    assert requests[0] == requests[1]
    torch.testing.assert_close(spare.loaded(), {"weight": torch.full((1000,), 2.0)})


def test_all_spares_receive_each_copy(spare: Spare) -> None:
    other = spare.copies.parents[2] / "other"
    (other / MEMORY).mkdir(parents=True)
    spare.begin()
    environment = {**os.environ, WORKER_SOCKET: f"{other}/socket"}
    with subprocess.Popen([sys.executable, "-c", STANDS_BY], env=environment) as process:
        try:
            for step in (1, 2):
                spare.save(step)
                eventually(lambda step=step: spare.has(step) and spare.has(step, "other"))
        finally:
            process.kill()


async def test_a_spare_goes_on_after_an_error_of_the_tcp_store(spare: Spare) -> None:
    async with TcpProxy(f"127.0.0.1:{spare.store.port}") as proxy:
        spare.begin(proxy.endpoint)
        spare.save(1)
        await asyncio.to_thread(eventually, lambda: spare.has(1))
        proxy.cut()
        spare.save(2)
        await asyncio.to_thread(eventually, lambda: spare.has(2))
        await asyncio.to_thread(spare.end)
