"""Worker metrics on the agent's page: they need no setup, and survive the exit of a worker."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.measured import Measured

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("method", ["fork-server", "exec"])
async def test_values_of_both_metrics_apis_have_the_rank_even_of_a_stopped_worker(tmp_path: Path, method: str) -> None:
    measured = Measured(
        tmp_path,
        """
        from torch.distributed.elastic import metrics as torchs
        from torchelastic import metrics
        stream = metrics.getStream("my_app")
        metrics.configure(metrics.ConsoleMetricHandler(), group="my_app")
        rank = int(os.environ["RANK"])
        stream.add_value("train.loss", 0.25 + rank)
        metrics.put_metric("checkpoint.write_latency_ms", 2000)
        metrics.configure(metrics.NullMetricHandler(), group="my_app")
        stream.add_value("step.ms", 100 * rank)

        torchs.configure(torchs.ConsoleMetricHandler())
        torchs.put_metric("loss", 3, "by_torch")

        @torchs.prof(group="by_torch")
        def evaluate():
            pass

        evaluate()
        print(f"measured by {os.getpid()}", flush=True)
        """,
        "--nproc-per-node=2",
        f"--start-method={method}",
    )
    async with measured.agent as agent:
        await measured.after("measured", count=2)
        os.kill(int((await agent.wait_for_line(r"\[rank 1\] measured by (\d+)"))[1]), signal.SIGSTOP)
        page = await measured.page()
    assert page.named("my_app") == {
        ("my_app_train_loss", (("rank", "0"),)): 0.25,
        ("my_app_train_loss", (("rank", "1"),)): 1.25,
        ("my_app_step_seconds", (("rank", "0"),)): 0.0,
        ("my_app_step_seconds", (("rank", "1"),)): 0.1,
    }
    assert page.value("torchelastic_checkpoint_write_latency_seconds_sum", rank="1") == 2
    assert page.value("torchelastic_round") == 1
    assert page.value("by_torch_loss", rank="1") == 3
    assert page.value("by_torch_main_evaluate_success", rank="1") == 1
    assert "[my_app]: train.loss=1.25" in agent.output
    assert "[by_torch]: loss=3" in agent.output


async def test_counters_survive_a_sigkill_and_the_exit_of_a_worker_and_gauges_do_not(tmp_path: Path) -> None:
    measured = Measured(
        tmp_path,
        """
        from torchelastic import metrics
        metrics.declare("my_app", counters=["samples"], histograms={"step.ms": [0.1, 1]})
        round, rank = int(os.environ["TORCHELASTIC_ROUND"]), int(os.environ["RANK"])
        stream = metrics.getStream("my_app")
        stream.add_value("samples", 64 if round == 1 else 1)
        stream.add_value("step.ms", 50 if round == 1 else 500)
        if round == 1:
            stream.add_value("loss", 0.5)
            stream.add_value("samples", -1)
        print(f"round {round} measured by {os.getpid()}", flush=True)
        if round == 2:
            stream.add_value("accuracy", 0.5)
            if rank == 1:
                sys.exit()
        """,
        "--nproc-per-node=2",
    )
    async with measured.agent as agent:
        before = await measured.after("round 1 measured", count=2)
        os.kill(int((await agent.wait_for_line(r"round 1 measured by (\d+)"))[1]), signal.SIGKILL)
        await measured.after("round 2 measured", count=2)
        after = await measured.until(
            lambda page: [page.value("my_app_accuracy", rank=rank) for rank in "01"] == [0.5, None]
        )
    for rank in ("0", "1"):
        assert before.value("my_app_loss", rank=rank) == 0.5
        assert before.value("my_app_samples_total", rank=rank) == 64
        assert after.value("my_app_samples_total", rank=rank) == 65
        assert after.value("my_app_step_seconds_bucket", rank=rank, le="0.1") == 1
        assert after.value("my_app_step_seconds_count", rank=rank) == 2
        assert after.value("my_app_step_seconds_sum", rank=rank) == pytest.approx(0.55)
        assert after.value("my_app_loss", rank=rank) is None
        assert after.value("torchelastic_metrics_dropped_total", reason="negative", rank=rank) == 1


async def test_programs_started_in_sequence_by_a_shell_script_are_one_worker(tmp_path: Path) -> None:
    script = tmp_path / "program.sh"
    script.write_text(
        dedent(
            f"""\
            source='from torchelastic import metrics; import sys
            metrics.declare("my_app", counters=["samples"])
            metrics.put_metric("samples", 4, "my_app")
            metrics.put_metric(sys.argv[1], 1, "my_app")'
            {sys.executable} -c "$source" first && {sys.executable} -c "$source" second && echo measured
            read line < {tmp_path / "go"}
            """
        )
    )
    measured = Measured(tmp_path, "", "--no-python", "sh", str(script))
    async with measured.agent:
        page = await measured.after("measured")
    assert page.named("my_app") == {
        ("my_app_samples_total", (("rank", "0"),)): 8,
        ("my_app_first", (("rank", "0"),)): 1,
        ("my_app_second", (("rank", "0"),)): 1,
    }


async def test_a_worker_that_corrupts_its_metrics_harms_no_other_worker_and_the_next_round_trains(
    tmp_path: Path,
) -> None:
    measured = Measured(
        tmp_path,
        """
        from torchelastic import metrics
        round, rank = int(os.environ["TORCHELASTIC_ROUND"]), int(os.environ["RANK"])
        metrics.declare("my_app", counters=["samples"])
        metrics.put_metric("samples", 1, "my_app")
        if round == 1 and rank == 0:
            descriptor = os.open(os.environ["TORCHELASTIC_METRICS_FILE"], os.O_RDWR)
            os.pwrite(descriptor, b"[" * (512 << 10), 0)
            try:
                os.truncate(descriptor, 0)
            except PermissionError:
                print("cannot truncate", flush=True)
            print(f"spoiled by {os.getpid()}", flush=True)
        print(f"round {round} measured", flush=True)
        """,
        "--nproc-per-node=2",
        env={"PYTHONPATH": str(ROOT)},
    )
    async with measured.agent as agent:
        before = await measured.after("round 1 measured", count=2)
        os.kill(int((await agent.wait_for_line(r"spoiled by (\d+)"))[1]), signal.SIGKILL)
        after = await measured.after("round 2 measured", count=2)
    assert before.value("my_app_samples_total", rank="1") == 1
    assert after.value("my_app_samples_total", rank="1") == 2
    assert "[rank 0] cannot truncate" in agent.lines
    assert not any("/metrics does not show" in line for line in agent.lines)
