"""The rendezvous benchmark completes; a change costs a node the same number of requests at every size."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.support.etcd import find_etcd

pytestmark = pytest.mark.real

FEW, MORE = 4, 16

SLACK = 1.0
"""The tolerance in requests per node: election attempts and merged changes vary."""


async def test_the_requests_of_a_change_do_not_grow_with_the_square_of_the_nodes() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.rendezvous", "--json", f"--nodes={FEW},{MORE}", f"--peer-nodes={FEW}"),
        *("--repeat=1", f"--etcd={find_etcd()}"),
        cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told, notes = await process.communicate()
    assert process.returncode == 0, notes.decode()
    report = json.loads(told)

    measured = {measurement["name"]: measurement["ours"]["median"] for measurement in report["measurements"]}
    assert all(seconds > 0 for seconds in measured.values())
    assert {f"N={FEW}, first", f"N={MORE}, first", f"N={MORE}, the leader leaves, one comes"} <= measured.keys()

    for measurement in report["measurements"]:
        compared = measurement["name"] in {f"N={FEW}, first", f"N={FEW}, a worker fails"}
        assert (measurement["peer"] is not None) is compared
        assert not compared or measurement["ratio"] > 0

    rows = report["requests_and_bytes"]
    per_node = {(row["kind"], row["nodes"]): row["requests_per_node"] for row in rows}
    for kind in {row["kind"] for row in rows}:
        assert 0 < per_node[kind, MORE] <= per_node[kind, FEW] + SLACK, f"{kind}: {per_node}"
    assert all(row["sent_bytes"] > 0 and row["received_bytes"] > row["round_bytes"] > 0 for row in rows)
