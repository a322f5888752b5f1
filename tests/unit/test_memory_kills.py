"""Kills for memory are counted where the kernel counts them, whichever version of cgroups it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from torchelastic.agent.memory_kills import MemoryKills

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("membership", "counter", "content"),
    [
        ("0::/kubepods/pod1\n", "kubepods/pod1/memory.events", "low 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n"),
        ("0::/\n", "memory.events", "oom_kill 2\n"),
        ("0::/../outer\n", "memory.events", "oom_kill 2\n"),
        ("4:memory:/docker/1\n0::/\n", "memory/docker/1/memory.oom_control", "oom_kill_disable 0\noom_kill 2\n"),
        ("9:cpu,memory:/docker/1\n0::/\n", "memory/memory.oom_control", "oom_kill 2\n"),
    ],
)
def test_the_counter_of_our_own_cgroup_is_read(membership: str, counter: str, content: str, tmp_path: Path) -> None:
    (tmp_path / "membership").write_text(membership)
    path = tmp_path / "cgroup" / counter
    path.parent.mkdir(parents=True)
    path.write_text(content)
    (tmp_path / "vmstat").write_text("oom_kill 70\n")
    kills = MemoryKills(root=tmp_path / "cgroup", membership=tmp_path / "membership", machine=tmp_path / "vmstat")
    assert kills.count() == 2


def test_the_whole_machines_counter_serves_where_there_is_no_cgroups(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 9\noom_kill 70\n")
    assert MemoryKills(root=tmp_path, membership=tmp_path / "none", machine=tmp_path / "vmstat").count() == 70


def test_nothing_is_counted_where_nothing_counts(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("not a line of that kind\n\n0::/x\n")
    (tmp_path / "vmstat").write_text("oom_kill many\n")
    assert MemoryKills(root=tmp_path, membership=tmp_path / "membership", machine=tmp_path / "vmstat").count() == 0
