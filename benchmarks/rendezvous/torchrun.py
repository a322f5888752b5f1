"""The baseline of :mod:`benchmarks.rendezvous`: torchrun's rendezvous with its c10d backend.

N handlers in N threads of one process use one TCPStore, like N agents of torchrun, but without N interpreters that
import torch. The clock starts when ``next_rendezvous`` is called in all threads at once, and stops when the last call
returns. Two things favor the baseline: the connections are open before the first round, and the second round, which
follows a failed worker, begins at once, although torchrun's agents notice a failure only at the next monitor interval.
The minimum is N nodes: with a lower minimum, torchrun would complete the round after the last call, and later nodes
would wait for the next round.

``python -m benchmarks.rendezvous.torchrun NODES MAX LAST_CALL`` prints the seconds of the first and second round
as JSON.
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
    """Return the seconds of the first and of the second round.

    Args:
        nodes: the number of handlers.
        most: the maximum number of nodes.
        last_call: torchrun's last_call_timeout in seconds.
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
            raise RuntimeError(f"{world} of {nodes} nodes are in the round")
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
    """Measure and print."""
    nodes, most, last_call = sys.argv[1:]
    print(json.dumps(measure(int(nodes), int(most), float(last_call))), flush=True)
    os._exit(0)  # the handlers' threads keep sending heartbeats


if __name__ == "__main__":
    main()
