"""What the workers run while recovery is measured: they reduce a number again and again, and tell when they could.

Each process tells of its first all-reduce, and then of one in every BENCHMARK_EVERY seconds (0: of none), in a line of
JSON to the named pipe BENCHMARK_BEATS. All times are the monotonic clock's, which all processes of a machine share.
"""

import time

BEGAN = time.monotonic()

import json  # noqa: E402 - what is imported is measured, too
import os  # noqa: E402
from datetime import timedelta  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

IMPORTED = time.monotonic()
STEP = 0.005
"""Seconds between all-reduces: two processors are to be had for recovering, not for reducing."""


def main() -> None:
    """Meet, and reduce for ever."""
    pipe = os.open(os.environ["BENCHMARK_BEATS"], os.O_WRONLY)
    every = float(os.environ["BENCHMARK_EVERY"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["BENCHMARK_TIMEOUT"])))
    met = time.monotonic()
    dist.all_reduce(torch.ones(1))
    reduced = now = time.monotonic()
    facts = {
        "node": os.environ["BENCHMARK_NODE"],
        "pid": os.getpid(),
        "round": int(os.environ.get("TORCHELASTIC_ROUND", "0")),
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "began": BEGAN,
        "imported": IMPORTED,
        "met": met,
        "reduced": reduced,
    }
    told = 0.0
    while True:
        if not told or (every and now - told >= every):
            os.write(pipe, json.dumps({**facts, "at": now}).encode() + b"\n")
            told = now
        time.sleep(STEP)
        dist.all_reduce(torch.ones(1))
        now = time.monotonic()


main()
