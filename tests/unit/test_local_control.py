"""The control API from both ends: its server and its client, over a real socket, about a run that is only pretended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from elastic_operator.errors import BadInput, ClusterError, NotFound
from elastic_operator.local.client import LocalClient, connect, find_job, known_jobs
from elastic_operator.local.control import control_server
from elastic_operator.local.publisher import Publisher
from elastic_operator.local.run_folder import RunFolder, create_run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NOW = 1_700_000_000.0


class PretendedRun:
    """A run that counts its pods, and ends when it is deleted."""

    def __init__(self, folder: RunFolder, control_socket: Path) -> None:
        self.replicas = 2
        self.rests = False
        self.ended: dict[str, Any] | None = None
        self.publisher = Publisher(self.snapshot)
        self._folder = folder
        self._socket = control_socket

    def snapshot(self) -> dict[str, Any]:
        return {
            "manifest": {"metadata": {"name": "digits"}, "spec": {"replicas": self.replicas}},
            "run": {
                "id": self._folder.run_id,
                "socket": str(self._socket),
                "alive": self.ended is None,
                "ended": self.ended,
            },
        }

    def scale(self, replicas: int) -> None:
        if replicas > 3:
            raise BadInput("spec.replicas must not be larger than 3")
        self.replicas = replicas
        self.publisher.touch()

    def suspend(self, *, rest: bool) -> None:
        if self.rests and rest:
            raise BadInput("it rests already")
        self.rests = rest
        self.publisher.touch()

    def delete(self) -> None:
        self.ended = {"how": "deleted"}
        self._folder.write_record(self.snapshot())
        self.publisher.close()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path, "digits", NOW)


@pytest_asyncio.fixture
async def run(folder: RunFolder, tmp_path: Path) -> AsyncIterator[PretendedRun]:
    control_socket = tmp_path / "s"
    pretended = PretendedRun(folder, control_socket)
    async with control_server(pretended, control_socket):
        folder.write_record(pretended.snapshot())
        yield pretended
        pretended.publisher.close()
    assert not control_socket.exists()


async def test_a_run_is_found_by_the_name_of_its_job_and_by_its_id(
    run: PretendedRun, tmp_path: Path, folder: RunFolder
) -> None:
    run.replicas = 3  # not in the folder yet
    for name in ("digits", folder.run_id):
        found = await asyncio.to_thread(find_job, name, home=tmp_path)
        assert found["manifest"]["spec"]["replicas"] == 3
        assert found["run"]["alive"]


async def test_a_run_can_be_scaled_and_refuses_with_its_own_sentence(run: PretendedRun, tmp_path: Path) -> None:
    client = await asyncio.to_thread(connect, "digits", home=tmp_path)
    await asyncio.to_thread(client.scale, 1)
    assert run.replicas == 1
    with pytest.raises(BadInput, match=r"^spec.replicas must not be larger than 3$"):
        await asyncio.to_thread(client.scale, 4)
    assert (await asyncio.to_thread(client.snapshot))["manifest"]["spec"]["replicas"] == 1


async def test_a_run_can_be_suspended_and_resumed_and_refuses_with_its_own_sentence(
    run: PretendedRun, tmp_path: Path
) -> None:
    client = await asyncio.to_thread(connect, "digits", home=tmp_path)
    await asyncio.to_thread(client.suspend, rest=True)
    assert run.rests
    with pytest.raises(BadInput, match=r"^it rests already$"):
        await asyncio.to_thread(client.suspend, rest=True)
    await asyncio.to_thread(client.suspend, rest=False)
    assert not run.rests


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"replicas": "3"}', b'{"replicas": true}', b'{"replicas": 1.5}'])
async def test_a_request_that_makes_no_sense_is_refused(run: PretendedRun, tmp_path: Path, body: bytes) -> None:
    assert "whole number" in await refusal_of("/job/scale", body, tmp_path)
    assert run.replicas == 2


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"suspend": "true"}', b'{"suspend": 1}'])
async def test_to_suspend_is_a_yes_or_a_no(run: PretendedRun, tmp_path: Path, body: bytes) -> None:
    assert 'send {"suspend": true} or {"suspend": false}' in await refusal_of("/job/suspend", body, tmp_path)
    assert not run.rests


async def refusal_of(path: str, body: bytes, folder: Path) -> str:
    """What is said of a PATCH with this body that is refused."""
    reader, writer = await asyncio.open_unix_connection(str(folder / "s"))
    head = f"PATCH {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    assert answer.startswith("HTTP/1.1 422 ")
    return str(json.loads(answer.partition("\r\n\r\n")[2])["message"])


async def test_who_watches_sees_every_state_that_lasts_and_the_end(run: PretendedRun, tmp_path: Path) -> None:
    client = await asyncio.to_thread(connect, "digits", home=tmp_path)
    snapshots = client.watch()
    assert (await asyncio.to_thread(next, snapshots))["manifest"]["spec"]["replicas"] == 2
    run.scale(3)
    assert (await asyncio.to_thread(next, snapshots))["manifest"]["spec"]["replicas"] == 3
    run.delete()
    assert (await asyncio.to_thread(next, snapshots))["run"]["ended"] == {"how": "deleted"}
    assert await asyncio.to_thread(next, snapshots, None) is None


async def test_deleting_returns_when_the_run_has_ended(run: PretendedRun, tmp_path: Path) -> None:
    client = await asyncio.to_thread(connect, "digits", home=tmp_path)
    await asyncio.to_thread(client.delete)
    assert run.ended is not None
    with pytest.raises(NotFound, match="no job digits is running here"):
        connect("digits", home=tmp_path)


async def test_a_run_that_was_killed_is_known_by_what_it_set_down_last(tmp_path: Path, folder: RunFolder) -> None:
    control_socket = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(control_socket))
    folder.write_record(PretendedRun(folder, control_socket).snapshot())
    lost = find_job("digits", home=tmp_path)
    assert not lost["run"]["alive"]
    assert lost["run"]["ended"] is None
    with pytest.raises(NotFound, match="no job digits is running here"):
        connect("digits", home=tmp_path)
    with pytest.raises(NotFound, match="has ended"):
        LocalClient("digits", control_socket).scale(3)


async def test_a_run_that_breaks_off_in_the_middle_of_an_answer_is_told_from_a_refusal(tmp_path: Path) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        writer.close()

    async with await asyncio.start_unix_server(break_off, str(tmp_path / "s")):
        with pytest.raises(ClusterError, match="did not answer"):
            await asyncio.to_thread(LocalClient("digits", tmp_path / "s").snapshot)


def test_of_several_runs_the_latest_is_known_unless_all_are_asked_for(tmp_path: Path) -> None:
    for number in range(2):
        folder = create_run(tmp_path, "digits", NOW + number)
        run = {"id": folder.run_id, "ended": {"how": "failed"}}
        folder.write_record({"manifest": {"metadata": {"name": "digits"}}, "run": run, "number": number})
    assert [record["number"] for record in known_jobs(home=tmp_path)] == [1]
    assert [record["number"] for record in known_jobs("digits", every=True, home=tmp_path)] == [1, 0]
    with pytest.raises(NotFound, match="there is no job or run letters here"):
        known_jobs("letters", home=tmp_path)
    assert known_jobs(home=tmp_path / "elsewhere") == []


async def test_changes_that_come_close_together_are_one_and_the_last_is_never_missed() -> None:
    changes = 0
    publisher = Publisher(lambda: {"changes": changes})
    seen = []
    async with contextlib.aclosing(publisher.snapshots(interval=0.01)) as snapshots:
        async for snapshot in snapshots:
            seen.append(snapshot["changes"])
            if len(seen) == 1:
                for _ in range(50):
                    changes += 1
                    publisher.touch()
            elif len(seen) == 2:
                changes += 1
                publisher.close()
    assert seen == [0, 50, 51]
