"""Each example in the documentation of launching from Python works as documented."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import AgentProcess
from tests.support.launchers import Launcher
from tests.support.ports import free_range
from tests.support.scraping import scraped

if TYPE_CHECKING:
    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.real

PAGE = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text()
EXAMPLES = re.findall(r"^## ([^\n]*)$|^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def example(heading: str, number: int = 0) -> str:
    """The source of the example below a heading."""
    here, sources = "", []
    for title, source in EXAMPLES:
        here = title or here
        if source and here == heading:
            sources.append(source)
    return sources[number]


@pytest.mark.parametrize(
    ("heading", "said"),
    [
        ("One call", r"\{0: 6\.0, 1: 6\.0\}"),
        ("When the run fails", r"rank \d exited with 1: ValueError: the learning rate is negative"),
        ("A launcher of your own", "rank 0 returned: hello there"),
    ],
)
async def test_a_single_node_example_prints_what_its_text_promises(tmp_path: Path, heading: str, said: str) -> None:
    path = tmp_path / "example.py"
    path.write_text(example(heading))
    async with Launcher(path) as launcher:
        assert await launcher.code() == 0, launcher.output
    assert re.search(said, launcher.output), launcher.output


async def test_the_multi_node_example_trains_on_two_nodes(tmp_path: Path, etcd: EtcdServer) -> None:
    path = tmp_path / "example.py"
    path.write_text(example("One call", 1))
    run_id = str(uuid.uuid4())
    async with Launcher(path, etcd.endpoint, run_id) as a, Launcher(path, etcd.endpoint, run_id) as b:
        assert [await a.code(), await b.code()] == [0, 0]
    assert {a.lines[-1], b.lines[-1]} == {"{0: 0}", "{1: 1}"}


@pytest.mark.parametrize(("number", "ranks", "said"), [(0, 1, "trained"), (1, 2, "written")])
async def test_an_example_reports_progress_and_runs_unchanged_without_an_agent(
    tmp_path: Path, number: int, ranks: int, said: str
) -> None:
    path, port = tmp_path / "train.py", free_range(1).first
    source = example("Saying how far training is", number)
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


def test_every_example_is_run_here() -> None:
    assert sum(1 for _, source in EXAMPLES if source) == 6
