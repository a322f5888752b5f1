"""The agent's own metrics on its page, even after failures of workers and of the store."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support import etcd_kinds
from tests.support.agents import AgentProcess
from tests.support.launchers import Launcher, script
from tests.support.measured import Measured
from tests.support.scraping import Page, scraped
from torchelastic.metrics.series import OPERATIONS
from torchelastic.protocol.pod import Env

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.etcd_kinds import EtcdKind

pytestmark = pytest.mark.integration

SAYS_ITS_ROUND = """
round = os.environ["TORCHELASTIC_ROUND"]
print(f"round {round} pid {os.getpid()}", flush=True)
"""


def operations(page: Page) -> dict[tuple[str, str], float]:
    """Return the number of the agent's operations by operation and outcome."""
    found = page.named("torchelastic_operations_total").items()
    return {
        (dict(labels)["operation"], dict(labels)["outcome"]): count
        for (_, labels), count in found
        if "rank" not in dict(labels)
    }


def duration(page: Page, operation: str) -> float:
    seconds = page.value("torchelastic_operation_duration_seconds_sum", operation=operation)
    assert seconds is not None, operation
    return seconds


def requests(page: Page, outcome: str) -> dict[str, float]:
    """Return the number of store requests with this outcome, by kind of request."""
    counts = page.named("torchelastic_store_request_duration_seconds_count").items()
    return {dict(labels)["request"]: count for (_, labels), count in counts if ("outcome", outcome) in labels}


async def killed(measured: Measured, round: int) -> None:
    """Kill a worker of the round with SIGKILL."""
    os.kill(int((await measured.agent.wait_for_line(rf"round {round} pid (\d+)"))[1]), signal.SIGKILL)


async def test_agent_operations_are_measured_under_torchelastic_names(tmp_path: Path) -> None:
    measured = Measured(tmp_path, SAYS_ITS_ROUND, "--nproc-per-node=2", env={Env.JOB: "team/digits"})
    async with measured.agent:
        first = await measured.until(lambda page: ("initialize_workers", "success") in operations(page))
        await killed(measured, 1)
        second = await measured.until(lambda page: ("restart_workers", "success") in operations(page))
    assert "serving /metrics" not in measured.agent.output, "the requested port is used"
    assert first.job == second.job == ("team", "digits")
    begun = ("rendezvous", "assign_worker_ranks", "start_workers", "initialize_workers")
    assert operations(first) == {(operation, "success"): 1 for operation in begun}
    assert operations(second) == {
        **{(operation, "success"): 2 for operation in begun},
        ("monitor_workers", "success"): 1,
        ("stop_workers", "success"): 1,
        ("restart_workers", "success"): 1,
    }
    again = {operation: duration(second, operation) - duration(first, operation) for operation in begun}
    assert 0 < again["rendezvous"] + again["start_workers"] <= again["initialize_workers"]
    assert again["initialize_workers"] <= duration(second, "restart_workers")
    assert second.value("torchelastic_worker_restart_duration_seconds_count", cause="worker_failed") == 1
    assert second.value("torchelastic_recovery_duration_seconds_count", cause="worker_failed") is None, (
        "the program has made no step"
    )


@pytest.mark.parametrize(
    "step",
    [
        pytest.param("import torchelastic; torchelastic.step()", id="reported"),
        pytest.param("import torch; torch.optim.SGD([torch.zeros(1)]).step()", id="of an optimizer"),
    ],
)
async def test_a_recovery_ends_with_the_first_step_of_all_ranks(tmp_path: Path, step: str) -> None:
    source = f"""
        round, rank = os.environ["TORCHELASTIC_ROUND"], os.environ["RANK"]
        if round == "2" and rank == "1":
            os.open("slow", os.O_RDONLY)  # until the test opens it
        {step}
        print(f"round {{round}} pid {{os.getpid()}}", flush=True)
    """
    os.mkfifo(tmp_path / "slow")
    measured = Measured(tmp_path, source.replace('"slow"', repr(str(tmp_path / "slow"))), "--nproc-per-node=2")
    recovered, restarted = (f"torchelastic_{name}_duration_seconds" for name in ("recovery", "worker_restart"))
    async with measured.agent:
        await killed(measured, 1)
        await measured.after("round 2")
        waiting = await measured.until(lambda page: page.value(f"{restarted}_count", cause="worker_failed"))
        assert waiting.value(f"{recovered}_count") is None, "one rank has not made its first step"
        os.close(os.open(tmp_path / "slow", os.O_WRONLY))
        page = await measured.until(lambda page: page.value(f"{recovered}_count", cause="worker_failed"))
    whole, share = (page.value(f"{name}_sum", cause="worker_failed") for name in (recovered, restarted))
    assert whole is not None
    assert share is not None
    assert 0 < share < whole


async def test_a_custom_handler_receives_the_documented_calls(tmp_path: Path) -> None:
    source = """
        from torchelastic import LocalElasticAgent, WorkerSpec, metrics

        names = []

        class InMemory(metrics.MetricHandler):
            def emit(self, metric_data):
                names.append(metric_data.name)

        def train():
            if os.environ["TORCHELASTIC_ROUND"] == "1":
                sys.exit(3)

        if __name__ == "__main__":
            metrics.configure(InMemory(), group="torchelastic")
            LocalElasticAgent(WorkerSpec(fn=train, max_restarts=1)).run()
            print("names:", *sorted(set(names)), flush=True)
    """
    async with Launcher(script(tmp_path, source)) as launcher:
        names = (await launcher.wait_for_line(r"names: (.*)"))[1].split()
        assert await launcher.code() == 0
    assert {f"{name}.{what}" for name in OPERATIONS for what in ("success", "duration.ms")} <= {*names}
    assert not any("store" in name for name in names)


async def test_memory_is_shown_for_each_worker_with_its_children_and_for_the_agent(tmp_path: Path) -> None:
    measured = Measured(
        tmp_path,
        """
        if os.environ["RANK"] == "1":
            source = f"held = b'x' * ({300 << 20}); print('holds', flush=True); input()"
            child = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE)
        print("waits", flush=True)
        """,
        "--nproc-per-node=2",
    )
    async with measured.agent as agent:
        await agent.wait_for_line("holds")
        page = await measured.after("waits", count=2)
        small, large = (page.value("torchelastic_worker_memory_bytes", rank=rank) for rank in "01")
        resident = page.value("process_resident_memory_bytes")
    assert small is not None
    assert large is not None
    assert 10 << 20 < small < large - (290 << 20)
    assert resident is not None
    assert resident > 10 << 20


@pytest.mark.parametrize("kind", etcd_kinds.parameters(etcd_kinds.V3[1], etcd_kinds.V2[0]))
async def test_an_agent_without_a_store_and_with_failing_workers_serves_metrics(tmp_path: Path, kind: EtcdKind) -> None:
    async with kind.server(tmp_path) as server:
        flags = (f"--rdzv-backend=etcd-v{kind.api}", "--rdzv-id=digits", "--nnodes=1")
        measured = Measured(tmp_path, SAYS_ITS_ROUND, *flags, endpoint=server.endpoint)
        async with measured.agent:
            before = await measured.after("round 1 pid")
            assert before.job == ("", "digits")
            assert {"get", "list", "put", "compare_and_swap", "grant", "watch"} <= requests(before, "success").keys()
            assert requests(before, "failure") == {}
            await measured.until(lambda page: requests(page, "success").get("keep_alive"))

            await server.kill()
            await measured.until(lambda page: requests(page, "failure").get("keep_alive"))
            await killed(measured, 1)
            role = {"role": "default"}
            await measured.until(
                lambda page: (
                    page.value("torchelastic_worker_state", state="unhealthy", **role) == 1
                    or page.value("torchelastic_round") == 2
                )
            )

            await server.start()
            after = await measured.until(
                lambda page: (
                    page.value("torchelastic_round") == 2
                    and page.value("torchelastic_worker_state", state="healthy", **role) == 1
                )
            )
            assert requests(after, "failure")["keep_alive"] >= 1


async def test_the_metrics_page_is_served_on_any_free_port_while_the_run_waits_for_nodes(tmp_path: Path) -> None:
    flags = ("--rdzv-id=digits", "--nnodes=2", "--metrics-port=0", "--local-addr=127.0.0.1")
    async with (
        etcd_kinds.V3[1].server(tmp_path) as server,
        AgentProcess(f"--rdzv-endpoint={server.endpoint}", *flags, script(tmp_path, "")) as agent,
    ):
        port = int((await agent.wait_for_line(r"^[0-9:]{8} \[[^]]+\] serving /metrics on port (\d+)$"))[1])
        page = await scraped(port)
        assert page.value("process_resident_memory_bytes")
        assert page.value("torchelastic_world_size") in (None, 0)
