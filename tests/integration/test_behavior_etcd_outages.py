"""Training continues while etcd is paused, killed, unreachable or empty, and works with credentials."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from elastic_operator.certificates import JobAuthority
from tests.support.certificates import make_certificates
from tests.support.controlled_workers import TRAINING, ControlledRun
from tests.support.etcd import EtcdServer, fake_etcd
from torchelastic.protocol.pod import Env
from torchelastic.store.etcd_process import tls_flags

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from tests.support.agents import AgentProcess
    from tests.support.controlled_workers import ControlledWorker

pytestmark = pytest.mark.integration

LEASE = 1.0


async def train_on(workers: Sequence[ControlledWorker]) -> None:
    """Wait until all workers have taken further steps together."""
    before = [await worker.execute("answer = rounds") for worker in workers]
    more = "import time\nwhile rounds < {}: time.sleep(0.005)\nanswer = rounds"
    after = [await worker.execute(more.format(rounds + 10)) for worker, rounds in zip(workers, before, strict=True)]
    assert all(now > then for now, then in zip(after, before, strict=True))


def lines_with(agents: Sequence[AgentProcess], part: str = "") -> list[str]:
    """Return the lines that contain a text among those that the agents have printed so far."""
    return [line for agent in agents for line in agent.lines if part in line]


async def test_training_continues_without_etcd_with_few_retries_and_messages(
    tmp_path: Path, own_etcd: EtcdServer
) -> None:
    flags = ("--nnodes=2:3", f"--rdzv-conf=last_call_timeout=1,lease={LEASE:g}")
    port = int(own_etcd.endpoint.rpartition(":")[2])
    async with (
        ControlledRun(tmp_path, own_etcd) as run,
        run.agent("a", *flags) as a,
        run.agent("b", *flags) as b,
    ):
        workers = await run.round(1, world=2)
        await asyncio.gather(*(worker.execute(TRAINING) for worker in workers))

        with own_etcd.paused():
            await asyncio.sleep(2.5 * LEASE)  # until the leases have expired
            await train_on(workers)
        assert run.rounds == {1}

        heard = {agent.pid: len(agent.lines) for agent in (a, b)}
        await own_etcd.kill()
        requests: list[str] = []

        def hang_up(request: str) -> bytes:
            requests.append(request)
            return b""

        async with fake_etcd(hang_up, port):
            await asyncio.gather(*(agent.wait_for_line("the watch of the run's keys broke") for agent in (a, b)))
            await asyncio.sleep(2.0)  # requests are counted during this time
            await train_on(workers)
        assert 2 <= len(requests) < 60
        assert len(lines_with((a, b), "the watch of the run's keys broke")) == 2
        assert len(lines_with((a, b), "did not answer in time")) <= 4, "each outage is logged once"
        warnings = Counter(line.partition(" ")[2] for agent in (a, b) for line in agent.lines[heard[agent.pid] :])
        assert set(warnings.values()) == {1}, "an agent repeats a message"

        own_etcd.wipe()
        await own_etcd.start()
        async with run.agent("c", *flags) as c:
            grown = await run.round(2, world=3)
            assert [worker.node for worker in grown] == [*(worker.node for worker in workers), "c"]
            assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in grown} == {"0"}
            for worker in grown:
                worker.send("raise SystemExit(0)")
            assert [await agent.code() for agent in (a, b, c)] == [0, 0, 0]
        assert run.rounds == {1, 2}


@pytest.fixture
async def secured_etcd(tmp_path: Path) -> AsyncIterator[tuple[EtcdServer, str]]:
    """An etcd that requires certificates, a user and a password, and the configuration to connect to this etcd."""
    files = make_certificates(tmp_path)
    context = ssl.create_default_context(cafile=files.authority)
    context.load_cert_chain(files.client, files.client_key)
    async with EtcdServer(tmp_path, protocol="https", args=files.etcd_flags_for_clients) as server:
        await server.require_authentication(context)
        tls = f"cacert={files.authority},cert={files.client},key={files.client_key}"
        yield server, f"--rdzv-conf={tls},username=alice,password="


async def test_several_servers_certificates_a_user_and_a_password_come_from_the_command_line(
    tmp_path: Path, secured_etcd: tuple[EtcdServer, str]
) -> None:
    server, conf = secured_etcd
    endpoints = f"--rdzv-endpoint=127.0.0.1:1,{server.endpoint}"
    async with ControlledRun(tmp_path, server) as run:
        async with run.agent("a", endpoints, "--nnodes=1:1", f"{conf}s3cret") as agent:
            [worker] = await run.round(1, world=1)
            worker.send("raise SystemExit(0)")
            assert await agent.code() == 0
        async with run.agent("a", endpoints, "--nnodes=1:1", f"{conf}hunter2") as agent:
            assert await agent.code() == 5
        assert "hunter2" not in agent.output


async def test_training_continues_while_certificates_are_renewed_ten_times(tmp_path: Path) -> None:
    folder, lifetime = tmp_path / "tls", timedelta(seconds=6)
    folder.mkdir()

    def renew() -> None:
        for name, content in JobAuthority(bytes(32), "job").issue(["127.0.0.1"], lifetime).items():
            (folder / f"{name}.new").write_bytes(content)
            (folder / f"{name}.new").rename(folder / name)

    async def keep_renewing() -> None:
        for count in itertools.count(1):
            await asyncio.sleep(lifetime.total_seconds() / 2)
            renew()
            if count == 10:
                renewed.set()

    renew()
    renewed = asyncio.Event()
    flags = ("--nnodes=2:3", f"--rdzv-conf=last_call_timeout=1,lease={LEASE:g}")
    etcd = EtcdServer(tmp_path, protocol="https", args=tls_flags(f"{folder}"))
    async with (
        etcd,
        ControlledRun(tmp_path, etcd) as run,
        run.agent("a", *flags, env={Env.ETCD_TLS: f"{folder}"}) as a,
        run.agent("b", *flags, env={Env.ETCD_TLS: f"{folder}"}) as b,
    ):
        workers = await run.round(1, world=2)
        await asyncio.gather(*(worker.execute(TRAINING) for worker in workers))
        renewing = asyncio.create_task(keep_renewing())
        await renewed.wait()
        await train_on(workers)
        assert run.rounds == {1}
        assert not lines_with((a, b), "certificate")
        async with run.agent("c", *flags, env={Env.ETCD_TLS: f"{folder}"}):
            await run.round(2, world=3)
        renewing.cancel()
