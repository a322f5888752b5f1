"""The control API: its server and its client over a real socket, with a simulated run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import pytest_asyncio

from elastic_operator.client.local import LocalJobs
from elastic_operator.errors import BadInput, NotFound
from elastic_operator.local.control import SnapshotFeed, control_server
from elastic_operator.local.run_dir import RunDir, create_run, replace_file
from elastic_operator.views.job_view import EndView, JobView, RunView

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NOW = 1_700_000_000.0


class SimulatedRun:
    """A run without pods, which stores patches in its spec and ends when it is deleted."""

    def __init__(self, files: RunDir) -> None:
        self.spec: dict[str, Any] = {"replicas": 2, "suspend": False}
        self.ended: EndView | None = None
        self.snapshots = SnapshotFeed(self.snapshot)
        self._files = files

    def snapshot(self) -> JobView:
        files, ended = self._files, self.ended
        run = RunView(id=files.run_id, directory=str(files.path), alive=not ended, ended=ended)
        return JobView(manifest={"metadata": {"name": "digits"}, "spec": self.spec}, run=run)

    def record(self) -> None:
        replace_file(self._files.record, msgspec.json.encode(self.snapshot()))

    def patch(self, fields: dict[str, Any]) -> None:
        if fields.get("replicas") == 4:
            raise BadInput("spec.replicas must not be larger than 3")
        self.spec |= fields
        self.snapshots.touch()

    def delete(self) -> None:
        self.ended = EndView("deleted")
        self.record()
        self.snapshots.close()


@pytest.fixture
def files(tmp_path: Path) -> RunDir:
    return create_run(tmp_path, "digits", NOW)


@pytest.fixture
def jobs(tmp_path: Path) -> LocalJobs:
    return LocalJobs(home=tmp_path)


@pytest_asyncio.fixture
async def run(files: RunDir) -> AsyncIterator[SimulatedRun]:
    simulated = SimulatedRun(files)
    async with control_server(files, simulated.snapshots, simulated.patch, simulated.delete):
        simulated.record()
        yield simulated
        simulated.snapshots.close()
    assert not files.control.exists()


async def test_a_run_is_found_by_the_name_of_its_job_and_by_its_id(
    run: SimulatedRun, files: RunDir, jobs: LocalJobs
) -> None:
    run.spec["replicas"] = 3  # the run has not created its directory yet
    for name in ("digits", files.run_id):
        found = await asyncio.to_thread(jobs.describe, name)
        assert found.spec["replicas"] == 3
        assert found.run.alive
    files.report.write_text("{}")  # from an earlier suspension
    with pytest.raises(NotFound, match="its report is written when it has ended or is suspended"):
        await asyncio.to_thread(jobs.report, "digits")


async def test_a_run_can_be_scaled_and_suspended_and_its_errors_reach_the_client(
    run: SimulatedRun, jobs: LocalJobs
) -> None:
    await asyncio.to_thread(jobs.scale, "digits", 1)
    assert run.spec["replicas"] == 1
    with pytest.raises(BadInput, match=r"^spec.replicas must not be larger than 3$"):
        await asyncio.to_thread(jobs.scale, "digits", 4)
    for suspend in (True, False):
        await asyncio.to_thread(jobs.suspend, "digits", suspended=suspend)
        assert run.spec == {"replicas": 1, "suspend": suspend}


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"image": "i"}', b'{"replicas": null}'])
async def test_an_invalid_request_is_refused(run: SimulatedRun, files: RunDir, body: bytes) -> None:
    assert files.control.stat().st_mode & 0o777 == 0o700, "only this user can access the folder"
    with files.socket() as path:
        reader, writer = await asyncio.open_unix_connection(path)
    writer.write(f"PATCH /job HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    writer.write(body)
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    assert answer.startswith("HTTP/1.1 422 ")
    sentence = json.loads(answer.partition("\r\n\r\n")[2])["message"]
    assert sentence == 'send {"replicas": N} or {"suspend": true or false}'
    assert run.spec == {"replicas": 2, "suspend": False}


async def test_a_killed_run_is_described_by_its_last_record(files: RunDir, jobs: LocalJobs) -> None:
    files.control.mkdir()
    with socket.socket(socket.AF_UNIX) as killed, files.socket() as path:
        killed.bind(path)
    SimulatedRun(files).record()
    lost = jobs.describe("digits")
    assert (lost.run.alive, lost.run.ended) == (False, None)
    assert lost.events[-1].reason == "Killed"
    with pytest.raises(NotFound, match="no job digits is running on this machine"):
        jobs.scale("digits", 1)
    with pytest.raises(NotFound, match="there is no report of digits: was its run killed"):
        jobs.report("digits")


def test_only_the_latest_run_is_listed_unless_all_are_requested(tmp_path: Path, jobs: LocalJobs) -> None:
    for number in range(2):
        files = create_run(tmp_path, "digits", NOW + number)
        run = RunView(id=str(number), ended=EndView("failed"))
        job = JobView(manifest={"metadata": {"name": "digits"}}, run=run)
        replace_file(files.record, msgspec.json.encode(job))
    assert [job.run.id for job in jobs.jobs()] == ["1"]
    assert [job.run.id for job in jobs.jobs("digits", every_run=True)] == ["1", "0"]
    with pytest.raises(NotFound, match="there is no job or run letters here"):
        jobs.describe("letters")
    assert LocalJobs(home=tmp_path / "elsewhere").jobs() == []


async def test_changes_in_quick_succession_make_one_snapshot_and_the_last_is_not_missed() -> None:
    changes = 0
    feed = SnapshotFeed(lambda: JobView(manifest={"changes": changes}))
    seen = []
    async with contextlib.aclosing(feed.watch(0.01)) as snapshots:
        async for snapshot in snapshots:
            seen.append(snapshot.manifest["changes"])
            if len(seen) == 1:
                for _ in range(50):
                    changes += 1
                    feed.touch()
            elif len(seen) == 2:
                changes += 1
                feed.close()
    assert seen == [0, 50, 51]
