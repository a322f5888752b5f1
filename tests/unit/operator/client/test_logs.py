"""``elasticjob logs`` on a cluster: ranks are found in the logs of pods; no line is lost or printed twice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.client import LogSelector, cluster_logs
from elastic_operator.client.cluster import connect
from elastic_operator.client.cluster_logs import AGENT, ClusterLogs, PodLog
from elastic_operator.errors import NotFound
from tests.support.cluster_objects import job, pod, terminated_state
from tests.support.fake_api_server import FakeApiServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from elastic_operator.client.cluster import UserApi

A, B, C = "digits-0-aaaaa", "digits-1-bbbbb", "digits-1-ccccc"


def begun(pod: str, round: int, *ranks: int, world: int = 2) -> str:
    """Return the lines that an agent logs when a round begins."""
    formed = f"10:15:02 [{pod}] round {round}: {world} workers on {world} pods\n"
    these = f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"
    started = f"10:15:02 [{pod}] round {round}: started {these} of a world of {world}\n"
    return formed + (started if ranks else "")


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    """An API server with two pods that swapped their ranks in round 2."""
    async with FakeApiServer() as server:
        server.add(job(status={"round": 2}))
        server.add(pod(0, "aaaaa"))
        server.add(pod(1, "bbbbb"))
        await server.print(A, begun(A, 1, 0) + "[rank 0] one\n[rank 0] two\n")
        await server.print(B, begun(B, 1, 1) + "[rank 1] uno\n")
        await server.print(A, begun(A, 2, 1))
        await server.print(B, begun(B, 2, 0) + "[rank 0] three\n")
        await server.print(A, "[rank 1] tres\nTraceback of the agent\n")
        yield server


@pytest_asyncio.fixture
async def api(server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[UserApi]:
    monkeypatch.setattr(cluster_logs, "POLL_INTERVAL", 0.05)
    async with connect({}, kubeconfig=str(server.kubeconfig(tmp_path))) as api:
        yield api


class Printing:
    """Runs ``elasticjob logs`` and records its output and messages."""

    def __init__(self, api: UserApi, **selector: Any) -> None:
        self._api = api
        self._selector = selector
        self._task: asyncio.Task[str] | None = None
        self.output = b""
        self.messages: list[str] = []
        self.complete: bool | None = None

    def _write(self, output: bytes) -> None:
        self.output += output

    async def read(self, *, follow: bool = False) -> str:
        selector = LogSelector(**self._selector, follow=follow)
        logs = ClusterLogs(self._api, job(status={"round": 2}), selector, self._write, self.messages.append)
        self.complete = await logs.print()
        return self.output.decode()

    def follow(self) -> None:
        self._task = asyncio.create_task(self.read(follow=True))

    async def until(self, text: str) -> None:
        """Wait until this text is printed."""
        assert self._task
        async with asyncio.timeout(20):
            while text.encode() not in self.output:
                assert not self._task.done(), self.output
                await asyncio.sleep(0.01)  # the output has no event to wait for

    async def end(self) -> list[str]:
        """Wait until the command finishes; return the printed lines."""
        assert self._task
        await asyncio.wait_for(self._task, 20)
        return self.output.decode().splitlines()


async def read(api: UserApi, **selector: Any) -> list[str]:
    return (await Printing(api, **selector).read()).splitlines()


# -- printing


@pytest.mark.parametrize(
    ("selector", "lines"),
    [
        ({}, [f"[rank 0 on {B}] three", f"[rank 1 on {A}] tres"]),
        ({"rank": 0}, ["three"]),
        ({"pod": A}, ["[rank 1] tres"]),
        ({"round": 1}, [f"[rank 0 on {A}] one", f"[rank 0 on {A}] two", f"[rank 1 on {B}] uno"]),
        ({"round": 1, "tail": 1}, [f"[rank 0 on {A}] two", f"[rank 1 on {B}] uno"]),
    ],
)
async def test_the_selected_lines_are_printed_in_order_of_time(
    api: UserApi, selector: dict[str, Any], lines: list[str]
) -> None:
    assert await read(api, **selector) == lines


async def test_lines_of_agents_are_labeled_once(api: UserApi) -> None:
    lines = await read(api, agents=True)
    assert f"10:15:02 [{A}] round 1: started rank 0 of a world of 2" in lines
    assert lines[-1] == f"[{A}] Traceback of the agent"
    assert not any("tres" in line for line in lines)
    assert (await read(api, pod=A, agents=True))[-1] == "Traceback of the agent"


@pytest.mark.parametrize(
    ("selector", "sentence"),
    [
        ({"rank": 7}, "there is no rank 7 in round 2; it has ranks 0-1"),
        ({"rank": 0, "round": 9}, "there is no log of round 9; there are logs of rounds 1-2"),
        ({"pod": "x"}, f"the job digits has no pod x; it has {A}, {B}"),
    ],
)
async def test_a_missing_log_is_reported_with_the_existing_ones(
    api: UserApi, selector: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(NotFound) as error:
        await read(api, **selector)
    assert str(error.value) == sentence


async def test_before_any_worker_has_started_the_agents_logs_are_named(server: FakeApiServer, api: UserApi) -> None:
    for name in ("aaaaa", "bbbbb"):
        server.remove(f"uid-{name}")
    with pytest.raises(NotFound, match=r"no worker of the job digits has printed anything; .*--agent"):
        await read(api)


async def test_the_round_of_a_log_without_its_beginning_is_inferred(server: FakeApiServer, api: UserApi) -> None:
    server.add(pod(2, "ddddd"))
    await server.print("digits-2-ddddd", "[rank 2] from round 1\n" + begun("digits-2-ddddd", 2, 2) + "[rank 2] two\n")
    server.add(pod(3, "eeeee"))
    await server.print("digits-3-eeeee", "[rank 3] a long log\n")
    assert [line.partition("] ")[2] for line in await read(api)] == [
        "three",
        "tres",
        "two",
        "a long log",
    ]
    assert await read(api, rank=2, round=1) == ["from round 1"]


async def test_a_round_without_workers_does_not_hide_the_previous_one(server: FakeApiServer, api: UserApi) -> None:
    await server.print(A, begun(A, 3))
    await server.print(B, begun(B, 3))
    assert await read(api) == [f"[rank 0 on {B}] three", f"[rank 1 on {A}] tres"]


async def test_an_unreadable_log_is_named_and_the_others_are_printed(server: FakeApiServer, api: UserApi) -> None:
    server.failing[f"/api/v1/namespaces/team/pods/{A}/log"] = 500, "dial tcp 10.0.0.9:10250: i/o timeout"
    printing = Printing(api)
    assert await printing.read() == f"[rank 0 on {B}] three\n"
    assert printing.messages == [f"the log of {A} cannot be read: dial tcp 10.0.0.9:10250: i/o timeout"]
    assert printing.complete is False


# -- following


async def finish(server: FakeApiServer, *pods: str) -> None:
    """Let the job succeed: its pods end, and the operator sets the status."""
    server.add(job(status={"round": 2, "state": "Succeeded"}))
    for name in pods:
        await server.end(name)
        index, suffix = name.split("-")[1:]
        server.add(pod(int(index), suffix, state=terminated_state(0, "")))


async def test_following_continues_with_new_rounds_and_pods_until_the_job_ends(
    server: FakeApiServer, api: UserApi
) -> None:
    following = Printing(api)
    following.follow()
    await following.until("tres")
    await server.print(B, "[rank 0] four\n")
    await following.until("four")
    await server.end(B)
    server.add(pod(1, "bbbbb", state=terminated_state(1, "")))
    server.remove("uid-bbbbb")
    server.add(pod(1, "ccccc", state={"waiting": {"reason": "ContainerCreating"}}))
    await server.print(C, begun(C, 3, 1) + "[rank 1] cinco\n")
    server.add(pod(1, "ccccc"))
    await following.until("cinco")
    await server.print(A, begun(A, 3, 0) + "[rank 0] six\n")
    await following.until("six")
    await finish(server, A, C)
    assert await following.end() == [
        f"[rank 0 on {B}] three",
        f"[rank 1 on {A}] tres",
        f"[rank 0 on {B}] four",
        f"[rank 1 on {C}] cinco",
        f"[rank 0 on {A}] six",
    ]
    assert following.messages == ["round 3 begins"]
    assert following.complete is True


async def test_a_broken_stream_is_resumed_where_it_broke(server: FakeApiServer, api: UserApi) -> None:
    following = Printing(api, rank=0)
    following.follow()
    await server.followed(B)
    await server.print(B, "[rank 0] four\n[rank 0] half of a")
    await following.until("four")
    await server.cut(B)
    await server.print_raw(B, b" line\n")
    await server.followed(B, 2)
    await server.print(B, "[rank 0] five\n")
    await following.until("five")
    await finish(server, A, B)
    assert await following.end() == ["three", "four", "half of a line", "five"]


async def test_lines_after_the_end_of_a_stream_are_not_lost(server: FakeApiServer, api: UserApi) -> None:
    following = Printing(api)
    following.follow()
    await server.followed(B)
    await server.end(B)
    await server.end(A)
    await server.print_raw(B, b"2026-01-01T00:00:00.000000001Z [rank 0] last")
    await finish(server, A, B)
    assert (await following.end())[-1] == f"[rank 0 on {B}] last"


async def test_following_one_round_ends_with_the_round(server: FakeApiServer, api: UserApi) -> None:
    following = Printing(api, round=2)
    following.follow()
    await following.until("tres")
    await server.print(A, "[rank 1] cuatro\n" + begun(A, 3, 0) + "[rank 0] five\n")
    await server.print(B, begun(B, 3, 1))
    assert await following.end() == [f"[rank 0 on {B}] three", f"[rank 1 on {A}] tres", f"[rank 1 on {A}] cuatro"]


# -- one log


def ranks_of(log: bytes) -> list[tuple[int, int, bytes]]:
    return [(line.round, line.rank, line.text) for line in PodLog(A).feed(log)]


def test_lines_of_workers_and_agents_are_distinguished() -> None:
    line = f"10:15:02 [{A}] round 2: started ranks 0, 1 of a world of 4"
    assert ranks_of(
        f"{line}\n[trainer rank 1] [rank 9] x\n[rank x] y\n[rank 0] 10:15:02 [{A}] round 7: started rank 5\n".encode()
    ) == [
        (2, AGENT, line.encode()),
        (2, 1, b"[rank 9] x"),
        (2, AGENT, b"[rank x] y"),
        (2, 0, f"10:15:02 [{A}] round 7: started rank 5".encode()),
    ]


def test_timestamps_of_all_time_zones_are_read() -> None:
    log = PodLog(A)
    lines = b"2026-01-01T12:00:00.000002000+02:00 b\n2026-01-01T10:00:00.5Z c\n2026-13-01T10:00:00Z d\n"
    first, second, third = log.feed(lines)
    assert first.time < second.time < first.time + 1
    assert (third.time, third.text) == (0, b"2026-13-01T10:00:00Z d")
    assert log.resume() == "2026-01-01T09:59:59Z"


@given(st.data())
def test_every_line_is_read_once_however_often_the_log_is_resumed(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.sampled_from([b"", b"a", b"b", b"[rank 0] x"]), max_size=12))
    # Several lines may have times in the same second, and two streams may be slightly out of order.
    times = st.lists(st.integers(0, 30), min_size=len(texts), max_size=len(texts), unique=True)
    order = sorted(data.draw(times), key=lambda time: time + data.draw(st.integers(0, 9)))
    lines = [b"2026-01-01T00:00:%02d.%dZ " % divmod(time, 10) + text for time, text in zip(order, texts, strict=True)]
    whole = b"".join(line + b"\n" for line in lines)
    log = PodLog(A)
    found: list[bytes] = []
    for _ in range(data.draw(st.integers(1, 4))):
        since = (log.resume() or "").removesuffix("Z").encode()
        start = next((n for n, line in enumerate(lines) if line[:19] >= since), len(lines))
        again = b"".join(line + b"\n" for line in lines[start:])
        found += [line.text for line in log.feed(again[: data.draw(st.integers(0, len(again)))])]
    log.resume()
    found += [line.text for line in log.feed(whole)]
    assert found == [text.removeprefix(b"[rank 0] ") for text in texts]
