"""The requests for notices that a worker sends to its agent."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import torchelastic
from torchelastic.protocol.worker import WORKER_SOCKET
from torchelastic.training import notices
from torchelastic.training.connection import AGENT_CONNECTION

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_request_that_cannot_be_sent_is_sent_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER_SOCKET, path := str(tmp_path / "agent"))
    monkeypatch.setattr(notices, "_RETRY_INTERVAL", 0.01)
    with socket.socket(socket.AF_UNIX) as agent:
        agent.settimeout(60)
        agent.bind(path)  # does not listen yet, so no process can connect
        torchelastic.ask_for_notice(5)
        torchelastic.ask_for_notice(7)
        agent.listen()
        connection, _ = agent.accept()
        with connection, connection.makefile() as lines:
            _, request = (json.loads(lines.readline()) for _ in range(2))
            AGENT_CONNECTION.close()
            rest = [json.loads(line) for line in lines]
    assert request["requested_notice"] == 7
    assert rest == []
