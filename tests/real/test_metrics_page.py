"""Each example in the documentation of metrics works as documented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.agents import AgentProcess
from tests.support.ports import free_range
from tests.support.scraping import scraped_text

pytestmark = pytest.mark.real

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
BEFORE, *PARTS = re.split(r"^```\w*\n", PAGE, flags=re.MULTILINE)
EXAMPLES = list(zip(PARTS[::2], PARTS[1::2], strict=True))
"""The programs, and the text that follows each."""

JOB = 'elasticjob="digits",job_namespace="",'
"""The labels that the documentation omits after the first example."""

SHOWN = [
    pytest.param(source, lines, id=lines[0].partition("{")[0])
    for source, after in EXAMPLES
    if (lines := re.findall(r"^    (my_app_\w+\{.*)$", after, re.MULTILINE))
]


@pytest.mark.parametrize(("source", "shown"), SHOWN)
async def test_an_example_is_documented_verbatim(tmp_path: Path, source: str, shown: list[str]) -> None:
    program, port = tmp_path / "train.py", free_range(1).first
    program.write_text(f"{source}\nprint('measured', flush=True)\nimport signal\nsignal.pause()\n")
    flags = (
        "--standalone",
        "--rdzv-id=digits",
        "--nproc-per-node=2",
        f"--metrics-port={port}",
        "--local-addr=127.0.0.1",
    )
    async with AgentProcess(*flags, program) as agent:
        for rank in (0, 1):
            await agent.wait_for_line(rf"\[rank {rank}\] measured")
        page = await scraped_text(port)
    assert len(shown) >= 2
    assert set(shown) <= {*page.splitlines(), *page.replace(JOB, "").splitlines()}


def test_there_is_an_example_of_each_kind() -> None:
    assert len(SHOWN) == 3
    assert len(EXAMPLES) == 5


@pytest.mark.parametrize(
    ("heading", "said"),
    [("The API", r"^\[my_app\] loss=0\.5$"), ("In any program", r"^http://127\.0\.0\.1:\d+/metrics$")],
)
def test_an_example_without_an_agent_prints_what_its_text_promises(heading: str, said: str) -> None:
    source = re.split(r"^```\w*\n", PAGE.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[1]
    ended = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True)
    assert re.search(said, ended.stdout.strip())
    assert ended.stderr == ""
