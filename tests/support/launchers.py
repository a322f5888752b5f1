"""Launcher scripts in Python for tests."""

from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING, ClassVar

from tests.support.agents import AgentProcess

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Launcher(AgentProcess):
    """A script that launches workers, with its output."""

    program = ()
    settings: ClassVar[Mapping[str, str]] = {}


def script(folder: Path, source: str) -> Path:
    """Write a script with :data:`COMMON` and this source, and return its path."""
    path = folder / "launcher.py"
    path.write_text(COMMON + dedent(source))
    return path


async def output_of(
    folder: Path, source: str, *arguments: str | Path, code: int = 0, env: dict[str, str] | None = None
) -> str:
    """Run a launcher with this source until it exits, and return its output."""
    async with Launcher(script(folder, source), *arguments, env=env) as launcher:
        assert await launcher.code() == code, launcher.output
    return launcher.output


COMMON = """\
import os, signal, sys, threading, time

def meet():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    rank, world = dist.get_rank(), dist.get_world_size()
    assert total.item() == world
    env = os.environ
    print(f"round {env['TORCHELASTIC_ROUND']} rank {rank} of {world} pid {os.getpid()}"
          f" restart {env['TORCHELASTIC_RESTART_COUNT']}", flush=True)
    return dist

def stay(dist, stop):
    import torch
    while True:
        flag = torch.tensor([float(os.path.exists(stop))])
        dist.all_reduce(flag)
        if flag.item():
            break
        time.sleep(0.01)
    dist.destroy_process_group()

def meet_and_stay(stop):
    dist = meet()
    rank = dist.get_rank()
    stay(dist, stop)
    return rank
"""
"""Functions for workers that form a process group, print a line, and run until a file exists."""
