"""A stand-in for the agent that can be killed: it starts two workers of a source and lists the processes.

Arguments: a folder that contains ``source.py``; the list is written to ``pids`` in it, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from tests.support.crew import ANY_PROGRAM, told
from torchelastic.agent.workers.pool import Workers, WorkerStart
from torchelastic.config.settings import LogSettings


async def main() -> None:
    folder = Path(sys.argv[1])
    async with Workers(ANY_PROGRAM, LogSettings(folder / "logs"), local_world_size=2, owns_process=True) as workers:
        env = {"PROGRAM": str(folder / "source.py"), "HERE": str(folder)}
        group = await workers.start(1, [WorkerStart(rank, rank, {**env, "RANK": str(rank)}) for rank in range(2)])
        for rank in group.pids:
            await told(folder / f"up.{rank}")
        part = folder / "pids.part"
        part.write_text(json.dumps({"workers": list(group.pids.values()), "fork server": workers.fork_server_pid}))
        part.rename(folder / "pids")
        command = await asyncio.to_thread(sys.stdin.readline)
        if command == "stop\n":
            await group.stop(0)
            (folder / "stopped").touch()
            await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    assert os.environ["PYTHONPATH"]
    asyncio.run(main())
