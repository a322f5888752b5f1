"""The worker of the memory benchmark: imports torch, reports, and waits."""

import json
import os
import signal
import time

import torch.distributed  # noqa: F401 - only its memory is measured

now = time.monotonic()
facts = {"node": os.environ["BENCHMARK_NODE"], "pid": os.getpid(), "rank": int(os.environ["RANK"])}
times = dict.fromkeys(("began", "imported", "met", "reduced", "at"), now)
pipe = os.open(os.environ["BENCHMARK_REPORTS"], os.O_WRONLY)
os.write(pipe, json.dumps({**facts, **times, "round": 0, "world": int(os.environ["WORLD_SIZE"])}).encode() + b"\n")
while True:
    signal.pause()
