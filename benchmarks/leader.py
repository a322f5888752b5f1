"""Prints the name of the node that leads a run: ``python -m benchmarks.leader HOST:PORT RUN_ID``.

A program of its own, for it has to run where etcd is reached from, which may be another network.
"""

from __future__ import annotations

import asyncio
import sys

from torchelastic.protocol import LeaderRecord, RunKeys, decode
from torchelastic.store import StoreSettings, connect


async def main(endpoint: str, run_id: str) -> None:
    """Look, and print; nothing where nobody leads."""
    key = RunKeys.of(run_id).leader
    store = await connect(StoreSettings(endpoints=(endpoint,)))
    try:
        for entry in (await store.list(key)).entries:
            print(decode(entry.value, LeaderRecord).node.rpartition(".")[0])
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
