"""Print the name of the node that leads a run: ``python -m benchmarks.recovery.leader HOST:PORT RUN_ID``.

This is a separate program, because it must run in the network namespace of etcd.
"""

from __future__ import annotations

import asyncio
import os
import sys

from torchelastic.protocol.codec import decode
from torchelastic.protocol.keys import RunKeys
from torchelastic.protocol.pod import Env
from torchelastic.protocol.records import LeaderRecord
from torchelastic.store.api import StoreSettings
from torchelastic.store.client import connect
from torchelastic.store.etcd_process import AUTHORITY, CERTIFICATE, KEY


async def main(endpoint: str, run_id: str) -> None:
    """Print the leader's name, or nothing if no node has led."""
    key = RunKeys(run_id).leader
    settings = StoreSettings((endpoint,))
    if folder := os.environ.get(Env.ETCD_TLS):
        authority, certificate, private = (f"{folder}/{name}" for name in (AUTHORITY, CERTIFICATE, KEY))
        settings = StoreSettings((endpoint,), "https", authority, certificate, private)
    store = await connect(settings)
    try:
        for entry in (await store.list(key)).entries:
            print(decode(entry.value, LeaderRecord).node.rpartition(".")[0])
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
