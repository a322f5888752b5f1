"""Print the name of the node that leads a run: ``python -m benchmarks.leader HOST:PORT RUN_ID``.

This is a separate program, because etcd may be in another network namespace.
"""

from __future__ import annotations

import asyncio
import sys

from torchelastic.protocol import LeaderRecord, RunKeys, decode
from torchelastic.store.api import StoreSettings
from torchelastic.store.client import connect


async def main(endpoint: str, run_id: str) -> None:
    """Print the name, or nothing if there is no leader."""
    key = RunKeys.of(run_id).leader
    store = await connect(StoreSettings(endpoints=(endpoint,)))
    try:
        for entry in (await store.list(key)).entries:
            print(decode(entry.value, LeaderRecord).node.rpartition(".")[0])
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
