"""The peer of :mod:`benchmarks.rendezvous`: torchrun's own rendezvous, its c10d backend, in a process of its own.

N handlers in N threads of one process meet over one TCPStore, which the first of them serves: what N agents of torchrun
do, without starting N interpreters that import torch. What is timed is ``next_rendezvous`` of all of them, called at
once, until the last has returned. Left out is what would count against the peer and says little about it: their
connections stand before the clock starts (each asks for a host's name, which takes long where there is no name server),
and the second meeting, which is what follows when a worker has failed, begins when all agents have noticed, though they
look for it at the monitor interval only.

At least N nodes are asked for: with fewer, torchrun's rendezvous closes one last call after those have come, and
whoever comes later waits for another.

Run by the benchmark as ``python -m benchmarks.rendezvous_torch NODES MAX LAST_CALL``; prints one line of JSON, the
seconds of the first and of the second meeting.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler


def measure(nodes: int, most: int, last_call: float) -> tuple[float, float]:
    """Have so many handlers meet twice.

    Args:
        nodes: how many.
        most: the largest number that the rendezvous would take.
        last_call: torchrun's last_call_timeout in seconds.

    Returns:
        The seconds of the first and of the second meeting.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def handler(index: int) -> RendezvousHandler:
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=f"127.0.0.1:{port}",
            run_id="benchmark",
            min_nodes=nodes,
            max_nodes=most,
            local_addr="127.0.0.1",
            is_host=index == 0,
            last_call_timeout=last_call,
        )
        backend, store = create_backend(parameters)
        return create_handler(store, backend, parameters)

    together = threading.Barrier(nodes)

    def meet(handler: RendezvousHandler) -> tuple[float, float]:
        together.wait()
        began = time.monotonic()
        world = handler.next_rendezvous().world_size
        if world != nodes:
            raise RuntimeError(f"{world} of {nodes} nodes have met")
        return began, time.monotonic()

    def meeting() -> float:
        began, ended = zip(*threads.map(meet, handlers), strict=True)
        seconds: float = max(ended) - min(began)
        return seconds

    host = handler(0)
    with ThreadPoolExecutor(nodes) as threads:
        handlers = [host, *threads.map(handler, range(1, nodes))]
        return meeting(), meeting()


def main() -> None:
    """Measure once and print it."""
    nodes, most, last_call = sys.argv[1:]
    print(json.dumps(measure(int(nodes), int(most), float(last_call))), flush=True)
    os._exit(0)  # handlers go on sending signs of life from threads of their own


if __name__ == "__main__":
    main()
