"""``elasticjob logs`` on a cluster parses the output of a real agent."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elastic_operator.client.cluster_logs import AGENT, PodLog

pytestmark = pytest.mark.integration

POD = "digits-0-aaaaa"


def test_ranks_and_rounds_are_parsed_from_real_agent_output() -> None:
    agent = [
        sys.executable,
        "-m",
        "torchelastic.run",
        "--standalone",
        "--prefix",
        "--nproc-per-node=2",
        "--node-name",
        POD,
    ]
    program = ["--role", "trainer", "--no-python", "--", "sh", "-c", "echo rank $RANK; echo bad news >&2"]
    done = subprocess.run([*agent, *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=True)
    log = PodLog(POD)
    lines = [*log.feed(done.stdout), *log.rest()]
    assert log.ranks == {1: (0, 1)}
    for rank in (0, 1):
        mine = sorted((line.round, line.text) for line in lines if line.rank == rank)
        assert mine == [(1, b"bad news"), (1, b"rank %d" % rank)]
    assert any(line.rank == AGENT and b"the run has succeeded" in line.text for line in lines)
