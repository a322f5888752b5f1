"""Each example in the README, and in the pages about metrics, launching, workers and scripts, works as documented."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.support.agents import AgentProcess
from tests.support.launchers import Launcher
from tests.support.ports import free_range
from tests.support.scraping import scraped, scraped_text
from tests.support.workers import poll_until

if TYPE_CHECKING:
    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration


class Example(NamedTuple):
    """A program in the documentation, with its heading and the text that follows."""

    heading: str
    source: str
    after: str


def examples(page: str) -> list[Example]:
    """Return the programs of a page."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    sections = re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return [
        Example(heading, *found)
        for heading, section in sections
        for found in re.findall(r"^```python\n(.*?)^```$(.*?)(?=^```|\Z)", section, re.MULTILINE | re.DOTALL)
    ]


README = Path(__file__).parents[2] / "README.md"
METRICS, LAUNCH, PYTHON_API = map(examples, ("metrics.md", "launch.md", "python-api.md"))
ELASTIC_SCRIPT = examples("elastic-script.md")
DIFFS = re.findall(r"^```diff\n([^`]*)^```$", (README.parent / "docs/elastic-script.md").read_text(), re.MULTILINE)


def below(heading: str, number: int = 0) -> str:
    """Return the source of an example below a heading."""
    return [each.source for each in (*METRICS, *LAUNCH, *PYTHON_API) if each.heading == heading][number]


async def test_the_script_of_the_readme_trains_on_when_a_worker_is_killed(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    says = "    import os, time; print(f'step {state.commits} in {os.getpid()}', flush=True)\n"
    slower = script.replace("            state.commit()", "            time.sleep(0.002); state.commit()")
    says_more = slower.replace("    parallel =", f"{says}    parallel =") + "\nprint('ends at', state.commits)\n"
    (tmp_path / "train.py").write_text(says_more)
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=1")
    async with AgentProcess(*flags, "train.py", cwd=tmp_path) as agent:
        killed = await agent.wait_for_line(r"\[rank 0\] step 0 in (\d+)")
        stays = await agent.wait_for_line(r"\[rank 1\] step 0 in (\d+)", since=0)
        await poll_until(lambda: any((tmp_path / "checkpoints").glob("*.pt")))
        os.kill(int(killed[1]), signal.SIGKILL)
        again = await agent.wait_for_line(rf"step (\d+) in {stays[1]}", since=agent.lines.index(stays.string) + 1)
        assert int(again[1]) >= 100
        assert await agent.code() == 0, agent.output
    assert agent.output.count("ends at 1000") == 2


# -- metrics

JOB = 'elasticjob="digits",job_namespace="",'
"""The labels that the documentation omits after the first example."""

SHOWN = [
    pytest.param(example.source, lines, id=lines[0].partition("{")[0])
    for example in METRICS
    if (lines := re.findall(r"^    (my_app_\w+\{.*)$", example.after, re.MULTILINE))
]


@pytest.mark.parametrize(("source", "shown"), SHOWN)
async def test_a_metrics_page_is_documented_verbatim(tmp_path: Path, source: str, shown: list[str]) -> None:
    program, port = tmp_path / "train.py", free_range(1).first
    program.write_text(f"{source}\nprint('measured', flush=True)\nimport signal\nsignal.pause()\n")
    flags = ("--rdzv-id=digits", "--nproc-per-node=2", f"--metrics-port={port}", "--local-addr=127.0.0.1")
    async with AgentProcess("--standalone", *flags, program) as agent:
        for rank in (0, 1):
            await agent.wait_for_line(rf"\[rank {rank}\] measured")
        page = await scraped_text(port)
    assert len(shown) >= 2
    assert set(shown) <= {*page.splitlines(), *page.replace(JOB, "").splitlines()}


@pytest.mark.parametrize(
    ("heading", "said"),
    [("The API", r"^\[my_app\] loss=0\.5$"), ("In any program", r"^http://127\.0\.0\.1:\d+/metrics$")],
)
def test_an_example_without_an_agent_prints_what_its_text_promises(heading: str, said: str) -> None:
    ended = subprocess.run([sys.executable, "-c", below(heading)], check=True, capture_output=True, text=True)
    assert re.search(said, ended.stdout.strip())
    assert ended.stderr == ""


def test_every_example_is_run_here() -> None:
    assert [len(SHOWN), len(METRICS), len(LAUNCH), len(PYTHON_API)] == [3, 5, 5, 6]
    assert [len(ELASTIC_SCRIPT), len(DIFFS)] == [1, 2]


# -- launching from Python


@pytest.mark.parametrize(
    ("heading", "said"),
    [
        ("Launch a function", "rank 0 of 2 has trained\nloss: True"),
        ("One call", r"\{0: 6\.0, 1: 6\.0\}"),
        ("When the run fails", r"rank \d exited with 1: ValueError: the learning rate is negative"),
        ("A launcher of your own", "rank 0 returned: hello there"),
    ],
)
async def test_a_single_node_example_prints_what_its_text_promises(tmp_path: Path, heading: str, said: str) -> None:
    path = tmp_path / "example.py"
    path.write_text(below(heading))
    async with Launcher(path) as launcher:
        assert await launcher.code() == 0, launcher.output
    assert re.search(said, launcher.output), launcher.output


async def test_the_multi_node_example_trains_on_two_nodes(tmp_path: Path, etcd: EtcdServer) -> None:
    path = tmp_path / "example.py"
    path.write_text(below("One call", 1))
    run_id = str(uuid.uuid4())
    async with Launcher(path, etcd.endpoint, run_id) as a, Launcher(path, etcd.endpoint, run_id) as b:
        assert [await a.code(), await b.code()] == [0, 0]
    assert {a.lines[-1], b.lines[-1]} == {"{0: 0}", "{1: 1}"}


async def test_the_example_of_the_checkpointer_continues_after_a_failure_and_reports_its_checkpoints(
    tmp_path: Path,
) -> None:
    source, port = below("Checkpointer"), free_range(1).first
    fails = "    if step == 499 and not start: dist.barrier(), checkpointer.wait(), sys.exit(1)\n"
    source = source.replace("    done = step + 1\n", f"{fails}    done = step + 1\n")
    (tmp_path / "train.py").write_text(f"import signal, sys\n{source}print('trained', flush=True)\nsignal.pause()\n")
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", f"--metrics-port={port}")
    async with AgentProcess(*flags, "--local-addr=127.0.0.1", "train.py", cwd=tmp_path) as agent:
        for rank in (0, 1):
            await agent.wait_for_line(rf"\[rank {rank}\] training begins at step 400")
        await agent.wait_for_line(r"\[rank 0\] trained")
        page = await scraped(port)
    assert sum(value for (name, _), value in page.samples.items() if name.endswith("write_latency_seconds_count")) >= 2


WAITS = """
    if state.step == 101 and torch.distributed.get_world_size() == 1:  # waits for another process
        __import__("time").sleep(0.01)
        MyState.waits = getattr(MyState, "waits", False) or not print("waits", flush=True)
        return
"""
MOMENTS = "print('updates of the moments:', *{int(each['step']) for each in state.optimizer.state.values()})"


async def test_a_process_that_joins_the_example_gets_the_state_and_the_moments(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    source = below("Training that survives changes of the world")
    step = "def train_step(state: MyState) -> None:"
    source = source.replace("max_workers=3", "max_workers=3&last_call_timeout=0").replace(step, f"{step}{WAITS}")
    (path := tmp_path / "main.py").write_text(source + MOMENTS)
    arguments = (path, etcd.endpoint, "1234")
    async with Launcher(*arguments, cwd=tmp_path) as first:
        await first.wait_for_line("^waits")
        async with Launcher(*arguments, cwd=tmp_path) as second:
            assert [await first.code(), await second.code()] == [0, 0], first.output
    for each in (first, second):
        assert each.lines[-2:] == ["trained 200 steps", "updates of the moments: 200"]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1", "2", "3", "4"}


@pytest.mark.parametrize(("number", "ranks", "said"), [(0, 1, "trained"), (1, 2, "written")])
async def test_an_example_reports_progress_and_runs_unchanged_without_an_agent(
    tmp_path: Path, number: int, ranks: int, said: str
) -> None:
    path, port = tmp_path / "train.py", free_range(1).first
    source = below("Reporting progress", number)
    path.write_text(f"{source}\nimport os, signal\n'RANK' in os.environ and signal.pause()\n")
    flags = ("--standalone", f"--nproc-per-node={ranks}", f"--metrics-port={port}", "--local-addr=127.0.0.1")
    async with AgentProcess(*flags, path, cwd=tmp_path) as agent:
        for rank in range(ranks):
            await agent.wait_for_line(rf"\[rank {rank}\] {said}")
        page = await scraped(port)
    measured = {name: value for (name, labels), value in page.samples.items() if ("rank", "0") in labels}
    assert measured["torchelastic_operation_duration_seconds_count"] == (200, 100)[number] - 1
    assert measured["torchelastic_checkpoint_write_latency_seconds_count"] == (2, 1)[number]
    if ranks == 1:
        async with Launcher(path, cwd=tmp_path) as alone:
            assert await alone.code() == 0, alone.output
        assert alone.lines == [said]


async def test_the_example_of_the_sampler_trains_the_same_model_if_the_number_of_ranks_changes(tmp_path: Path) -> None:
    saved = ".replace(CHECKPOINT)\n"
    fails = "            if 'FAILS' in os.environ and sampler.epoch == 3 and sampler.position: os._exit(1)\n"
    (path := tmp_path / "train.py").write_text("import os\n" + below("ElasticSampler").replace(saved, saved + fails))
    (alone := tmp_path / "alone").mkdir()
    (elastic := tmp_path / "elastic").mkdir()
    arguments = ("--standalone", "--max-restarts=0")
    async with AgentProcess(*arguments, path, cwd=alone) as agent:
        wanted = await agent.wait_for_line(r"\[rank 0\] (loss: .*)")
        assert await agent.code() == 0

    async with AgentProcess(*arguments, "--nproc-per-node=3", path, cwd=elastic, env={"FAILS": "1"}) as agent:
        assert await agent.code() != 0
    async with AgentProcess(*arguments, "--nproc-per-node=2", path, cwd=elastic) as agent:
        found = await agent.wait_for_line(r"\[rank 0\] (loss: .*)")
        assert await agent.code() == 0
    assert found[1] == wanted[1]


async def test_the_processes_of_the_example_in_place_continue_when_one_is_killed(tmp_path: Path) -> None:
    step = "            state.optimizer.step()\n"
    dies = "            if state.commits == 150 and os.environ['RANK'] == '1' and not os.path.exists('killed'):\n"
    dies += "                open('killed', 'x').close()\n                os._exit(3)\n"
    (path := tmp_path / "train.py").write_text("import os\n" + below("Train in place").replace(step, dies + step))
    async with AgentProcess("--standalone", "--nproc-per-node=2", path, cwd=tmp_path) as agent:
        assert await agent.code() == 0, agent.output
    begun = [line.rpartition(" ")[2] for line in agent.lines if re.match(r"\[rank \d\] training begins", line)]
    assert begun[:2] == ["0", "0"], agent.output
    assert begun[2] in {"150", "151"}, agent.output  # the other process trains alone
    *_, first, second = map(int, begun)
    assert first == second >= int(begun[2]), agent.output


# -- making a script elastic


def patched(script: str, diff: str) -> str:
    """Return the script with the changes of a diff."""
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE)[1:]:
        lines = [(line[:1], line[1:]) for line in hunk.splitlines(keepends=True)]
        lines = [(mark, line or "\n") if mark != "\n" else (" ", "\n") for mark, line in lines]
        before, after = ("".join(line for mark, line in lines if mark != other) for other in "+-")
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    return script


@pytest.mark.parametrize("level", [1, 2, 3])
async def test_a_script_of_each_level_continues_after_a_worker_was_killed(tmp_path: Path, level: int) -> None:
    script = ELASTIC_SCRIPT[0].source
    if level > 1:
        diff = DIFFS[level - 2]
        assert len(re.findall(r"^\+.", diff, re.MULTILINE)) == 8
        script = patched(script, diff)
    begins = "            optimizer.zero_grad()\n"
    dies = "            if epoch == 6 and batch == 150 and dist.get_rank() == 1 and not os.path.exists('killed'):\n"
    dies += "                open('killed', 'x').close()\n                os.kill(os.getpid(), 9)\n"
    assert script.count(begins) == 1
    (path := tmp_path / "train.py").write_text(script.replace(begins, dies + begins))
    async with AgentProcess("--standalone", "--nproc-per-node=2", path, cwd=tmp_path) as agent:
        assert await agent.code() == 0, agent.output
    epochs = [int(found[1]) for line in agent.lines if (found := re.search(r"\] epoch (\d+)$", line))]
    assert epochs[:7] == [*range(1, 8)], agent.output
    assert set(epochs[7:]) == {*range(7, 11)}, agent.output
    assert re.search(r"accuracy (0\.9[89]\d|1\.000)", agent.output), agent.output
