"""The benchmarks: complete measurements, no failures after random faults, and no leftover processes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.soak.faults import KINDS, plan
from elastic_operator.local.processes import find_etcd

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.integration


ROOT = Path(__file__).parents[2]
LIMIT = 300.0
FLOOR = "" if os.environ.get("ELASTICJOB_TEST_TORCH") == "oldest" else "'torch alone'"  # needs torch 2.14
ONCE = "--settle=0 --limit=120"
KILLED = "worker killed inside a collective, 4 ranks: survivors' all-reduce"
OTHER_FAULTS = "--settle=1 --limit=120 --only=hang --only=spare --ranks=4"
PLANNED = "--settle=1 --limit=120 --only=join --only=leave --only=broadcast --only=checkpoint --gigabytes=0.1"


def command(benchmark: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments]


def measured(scratch: Path, argv: Sequence[str]) -> dict[str, Any]:
    """Run a benchmark, check that it leaves no files, and return the printed document."""
    done = subprocess.run(
        argv, cwd=ROOT, env=environment(scratch), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not list(scratch.iterdir())
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is in the environment of a benchmark's processes; the path is short enough for sockets."""
    return tmp_path_factory.mktemp("b")


def environment(scratch: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(scratch)}


def processes_of(scratch: Path) -> list[str]:
    """Return the command lines of all live processes that have this folder in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes()
            argv = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if str(scratch).encode() in variables and argv:
            found.append(argv.replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_all_agents_train_together_after_random_faults_and_nothing_leaks(scratch: Path) -> None:
    document = measured(scratch, command("soak", "--json", f"--faults={len(KINDS)}", "--agents=4", "--seed=26"))
    assert document["passed"]
    assert sum(len(each["ours"]["samples"]) for each in document["measurements"]) == len(document["history"])


def test_a_seed_selects_the_faults() -> None:
    assert plan(1, 200, 4, 2.0) == plan(1, 200, 4, 2.0) != plan(2, 200, 4, 2.0)
    strikes = plan(1, 200, 4, 2.0)
    assert sum(len(strike) for strike in strikes) == 200
    assert {fault.kind for strike in strikes[: len(KINDS)] for fault in strike} == KINDS.keys()
    for strike in strikes:
        slots = [slot for fault in strike for slot in fault.slots]
        assert len(slots) == len(set(slots))


@pytest.mark.parametrize(
    ("benchmark", "arguments", "name"),
    [
        ("recovery", f"{ONCE} --only=worker", "worker killed"),
        ("memory", "--settle=0", "PSS of an agent and 4 workers"),
        ("metrics", "--steps=20 --limit=120", "scrape of 10,000 series"),
        ("first_step", "--limit=120 --only=run", "elasticjob run digits.yaml"),
        ("training", f"{ONCE} --only=kill --where=inside --only=commit --ranks=4 --baselines {FLOOR}", KILLED),
        ("training", f"{OTHER_FAULTS} --baselines", "agent killed, with a spare: steps repeated"),
        ("training", f"{PLANNED} --baselines", "second agent leaves: steps repeated"),
        ("launcher", "--limit=120 --only=launch --only=killed --baselines", "second launch in one program"),
    ],
)
def test_a_benchmark_prints_all_its_measurements(scratch: Path, benchmark: str, arguments: str, name: str) -> None:
    document = measured(scratch, command(benchmark, "--json", "--repeat=1", *shlex.split(arguments)))
    by_name = {each["name"]: each for each in document["measurements"]}
    assert name in by_name
    for each in by_name.values():
        assert each["ours"]["samples"]
        if each["unit"] == "steps":
            assert max(each["ours"]["samples"]) <= 1, each  # also a planned change may repeat a step of 10 ms
        if each["baseline"] is not None:
            assert len([*each["baseline"]["samples"], *each["baseline"]["never"]]) == 1
    medians = [row for row in document.get("medians (s)", ()) if row["case"].startswith("worker killed")]
    compared = {row["launcher"] for row in medians if row["survivors' all-reduce, ratio"]}
    assert compared == {row["launcher"] for row in medians}
    for row in document.get("next training step and agents' share", ()):
        assert 0 < row["agents' share (s)"] < row["next training step (s)"]
        assert {"agents' share, ratio", "next training step, ratio"} <= row.keys()


def test_training_continues_through_random_faults(scratch: Path) -> None:
    report = measured(scratch, command("storm", "--json", "--minutes=0.2", "--interval=5", "--limit=120", "--seed=1"))
    assert {row["program"] for row in report["goodput"]} == {"in place", "with restarts"}
    assert all(0 < row["goodput"] < 1.1 and row["faults"] for row in report["goodput"]), report["goodput"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_benchmark_leaves_nothing_behind(scratch: Path, number: signal.Signals) -> None:
    argv = command("soak", "--faults=100", "--agents=2")
    with subprocess.Popen(argv, cwd=ROOT, env=environment(scratch), stderr=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stderr is not None
        said = benchmark.stderr.readline()
        assert "2 agents train" in said, said + benchmark.stderr.read()
        benchmark.stderr.readline()  # wait until the first fault is over
        assert processes_of(scratch)
        benchmark.send_signal(number)
        benchmark.stderr.read()  # wait until the last process that may write to this folder has exited
        benchmark.wait(LIMIT)
    assert not processes_of(scratch)
    assert not list(scratch.iterdir())


FEW, MORE = 4, 16

SLACK = 1.0
"""The tolerance in requests per node, because the numbers of election attempts and of merged changes vary."""


def test_the_requests_of_a_change_do_not_grow_with_the_square_of_the_nodes(scratch: Path) -> None:
    sizes = (
        f"--nodes={FEW},{MORE}",
        f"--baseline-nodes={FEW}",
        "--repeat=1",
        f"--etcd={find_etcd(os.environ['PATH'])}",
    )
    report = measured(scratch, command("rendezvous", "--json", *sizes))

    medians = {measurement["name"]: measurement["ours"]["median"] for measurement in report["measurements"]}
    assert all(seconds > 0 for seconds in medians.values())
    assert {f"N={FEW}, first", f"N={MORE}, first", f"N={MORE}, the leader leaves, one comes"} <= medians.keys()

    for measurement in report["measurements"]:
        compared = measurement["name"] in {f"N={FEW}, first", f"N={FEW}, a worker fails"}
        assert (measurement["baseline"] is not None) is compared
        assert not compared or measurement["ratio"] > 0

    rows = report["requests_and_bytes"]
    per_node = {(row["kind"], row["nodes"]): row["requests_per_node"] for row in rows}
    for kind in {row["kind"] for row in rows}:
        assert 0 < per_node[kind, MORE] <= per_node[kind, FEW] + SLACK, f"{kind}: {per_node}"
    assert all(row["sent_bytes"] > 0 and row["received_bytes"] > row["round_bytes"] > 0 for row in rows)
