"""Debuggers under ``torchelastic-run`` and under torchrun, side by side."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, Self

import pytest

from tests.support.agents import TIMEOUT
from tests.support.launchers import Launcher
from tests.support.ports import free_range

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.parametrize("module", ["torch.distributed.run", "torchelastic.run"])]

PROGRAM = """\
import os
os.write(1, f"rank {os.environ['RANK']}\\n".encode())
"""
LISTENS = """\
import debugpy, runpy, sys
debugpy.listen(("127.0.0.1", int(sys.argv.pop(1))))
print("listening", flush=True)
debugpy.wait_for_client()
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""A launcher that waits for a debugger."""

STOPS_AT = 2
"""The line of the program with a breakpoint."""


class Debugger:
    """A connection of an editor to debugpy, by the Debug Adapter Protocol."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._requests = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def attached(cls, program: Path, **configuration: Any) -> AsyncIterator[Self]:
        """Attach to a process, which then begins, with a breakpoint in the program."""
        address = configuration["connect"]
        reader, writer = await asyncio.open_connection(address["host"], address["port"])
        with contextlib.closing(writer):
            debugger = cls(reader, writer)
            debugger.request("initialize", adapterID="debugpy")
            debugger.request("attach", **configuration)
            await debugger.received("initialized")
            debugger.request("setBreakpoints", source={"path": str(program)}, breakpoints=[{"line": STOPS_AT}])
            debugger.request("configurationDone")
            yield debugger

    def request(self, command: str, **arguments: Any) -> None:
        self._requests += 1
        message = {"seq": self._requests, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(message).encode()
        self._writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    async def received(self, name: str) -> dict[str, Any]:
        """Return the body of the next event with this name, or of the response to the command with this name."""
        async with asyncio.timeout(TIMEOUT):
            while True:
                header = await self._reader.readuntil(b"\r\n\r\n")
                message = json.loads(await self._reader.readexactly(int(header.partition(b":")[2])))
                if name in (message.get("event"), message.get("command")):
                    return message.get("body", {})


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (path := tmp_path / "train.py").write_text(PROGRAM)
    return path


async def test_a_run_that_no_debugger_attaches_to_ends_as_without_debugpy(module: str, program: Path) -> None:
    debugpy = ["-Xfrozen_modules=off", "-m", "debugpy", "--listen", f"127.0.0.1:{free_range(1).first}"]
    async with Launcher(*debugpy, "-m", module, "--standalone", "--nproc-per-node=2", program) as launcher:
        assert await launcher.code() == 0
    assert {"rank 0", "rank 1"} <= {*launcher.lines}


async def test_a_debugger_of_the_launcher_stops_the_workers_at_a_breakpoint(module: str, program: Path) -> None:
    port = free_range(1).first
    command = ["-c", LISTENS, str(port), module, "--standalone", "--nproc-per-node=2"]
    async with Launcher(*command, program) as launcher:
        await launcher.wait_for_line("^listening")
        async with Debugger.attached(program, connect={"host": "127.0.0.1", "port": port}, subProcess=True) as top:
            for _ in range(2):
                async with Debugger.attached(program, **await top.received("debugpyAttach")) as worker:
                    thread = (await worker.received("stopped"))["threadId"]
                    worker.request("stackTrace", threadId=thread)
                    [frame, *_] = (await worker.received("stackTrace"))["stackFrames"]
                    assert (frame["source"]["path"], frame["line"]) == (str(program), STOPS_AT)
                    worker.request("continue", threadId=thread)
                    await worker.received("terminated")
        assert await launcher.code() == 0
    assert {"rank 0", "rank 1"} <= {*launcher.lines}
