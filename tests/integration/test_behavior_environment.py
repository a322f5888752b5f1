"""A worker's environment has the documented variables, and those of the round are equal on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.agents import AgentProcess
from tests.support.controlled_workers import ControlledRun
from tests.support.isolation import network

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.support.controlled_workers import ControlledWorker
    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration

OF_THE_ROUND = {
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "TORCHELASTIC_ROUND",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "WORLD_SIZE",
}


def equal_on_all(workers: Sequence[ControlledWorker]) -> dict[str, str]:
    """Return the variables of the round, which must be equal in all workers."""
    [values] = {tuple(sorted((name, worker.env[name]) for name in OF_THE_ROUND)) for worker in workers}
    return dict(values)


async def test_the_environment_is_documented_and_round_variables_are_equal_on_all_ranks(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    flags = ("--nnodes=2", "--nproc-per-node=2", "--max-restarts=5", "--role=trainer")
    async with (
        ControlledRun(tmp_path, etcd) as run,
        run.agent("one", *flags, "--local-addr=127.0.0.2") as one,
        run.agent("two", *flags, "--local-addr=127.0.0.3") as two,
    ):
        workers = await run.round(1, world=4)
        shared = equal_on_all(workers)
        assert shared.pop("MASTER_ADDR") in {"127.0.0.2", "127.0.0.3"}
        port = shared.pop("MASTER_PORT")
        assert shared == {
            "GROUP_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "ROLE_NAME": "trainer",
            "ROLE_WORLD_SIZE": "4",
            "TORCHELASTIC_ROUND": "1",
            "TORCHELASTIC_MAX_RESTARTS": "5",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": run.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": "4",
        }
        own = ["RANK", "ROLE_RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
        assert [[worker.env[name] for name in own] for worker in workers] == [
            ["0", "0", "0", "0", "2"],
            ["1", "1", "0", "1", "2"],
            ["2", "2", "1", "0", "2"],
            ["3", "3", "1", "1", "2"],
        ]
        assert len({worker.env["TORCHELASTIC_ERROR_FILE"] for worker in workers}) == 4

        workers[3].send("raise SystemExit(7)")
        workers = await run.round(2, world=4)
        shared = equal_on_all(workers)
        assert (shared["TORCHELASTIC_ROUND"], shared["TORCHELASTIC_RESTART_COUNT"]) == ("2", "1")
        assert shared["MASTER_PORT"] != port
        address = (shared["MASTER_ADDR"], int(shared["MASTER_PORT"]))
        reached = f"import socket; socket.create_connection({address}).close(); answer = True"
        assert [await worker.execute(reached) for worker in workers] == [True] * 4

        for worker in workers:
            worker.send("raise SystemExit(0)")
        assert [await one.code(), await two.code()] == [0, 0]


MET = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("met at", *(os.environ[name] for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")))
"""


async def test_gloo_and_nccl_use_the_interface_of_the_node_address_unless_the_user_sets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    program = tmp_path / "met.py"
    program.write_text(MET)
    flags = ("--standalone", "--nproc-per-node=2", "--local-addr=10.1.2.3")
    within = network("rack7", "10.1.2.3")
    async with (
        AgentProcess(*flags, program, within=within) as agent,
        AgentProcess(*flags, program, within=within, env={"NCCL_SOCKET_IFNAME": "ib0"}) as other,
    ):
        await agent.wait_for_line(r"\[rank 0\] met at 10\.1\.2\.3 rack7 =rack7$")
        await other.wait_for_line(r"\[rank 0\] met at 10\.1\.2\.3 rack7 ib0$")
        assert [await agent.code(), await other.code()] == [0, 0]
