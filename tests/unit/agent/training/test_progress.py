"""The steps that a worker reports to its agent."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

import torchelastic
from torchelastic.protocol.worker import WORKER_SOCKET
from torchelastic.training import progress
from torchelastic.training.connection import AGENT_CONNECTION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket that accepts the connection of this process, which stands for rank 1."""
    for name, value in {"TORCHELASTIC_ROUND": "3", "RANK": "1", WORKER_SOCKET: str(tmp_path / "agent")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(progress, "REPORTER", progress.ProgressReporter())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        yield listener
    AGENT_CONNECTION.close()


def received(agent: socket.socket) -> list[dict[str, Any]]:
    """Return the messages of this process without the first one, when it has closed its connection."""
    AGENT_CONNECTION.close()
    with agent.accept()[0] as connection, connection.makefile() as lines:
        return [json.loads(line) for line in lines][1:]


def test_each_rank_reports_the_number_of_its_first_step(agent: socket.socket) -> None:
    torchelastic.step(7)
    torchelastic.step(8)
    assert [message["step"] for message in received(agent)] == [7]


def test_the_number_of_a_step_may_be_unknown(agent: socket.socket) -> None:
    torchelastic.step()
    torchelastic.step(8)
    assert [{*message} for message in received(agent)] == [{"first_step_at"}]


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 0 or more, not -1"):
        torchelastic.step(-1)


def test_a_state_reports_its_number_of_commits(agent: socket.socket) -> None:
    state = torchelastic.TorchState()
    state.load_state_dict({"commits": 5, "values": {}})
    state.restore()
    state.commit()
    assert [message["step"] for message in received(agent)] == [5]
