"""The output of workers is complete, in order, and intact at every destination."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from tests.support.workers import ANY_PROGRAM, next_exit, poll_until, start_workers, workers_of
from torchelastic.agent.worker_output import Console, LogPipe, WorkerOutput
from torchelastic.config.settings import LogSettings, Streams

pytestmark = pytest.mark.integration

BOTH_STREAMS = """
import os, sys
print("one")
print("two", file=sys.stderr)
os.write(1, b"three\\n")
os.write(2, b"four\\n")
print("five", end="")
"""


async def run(logs: LogSettings, folder: Path, source: str, count: int = 1) -> None:
    program = folder / "program.py"
    program.write_text(source)
    async with workers_of(ANY_PROGRAM, logs, 2) as workers:
        group = await start_workers(workers, *[{"PROGRAM": str(program)}] * count)
        for _ in range(count):
            await next_exit(group)
        await group.stop(0)


async def test_streams_are_redirected_and_teed_by_local_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "logs"
    logs = LogSettings(folder, redirects={0: Streams.ERR, 1: Streams.BOTH}, tee={0: Streams.OUT}, combined=True)
    await run(logs, tmp_path, BOTH_STREAMS, 3)
    out, err = capfd.readouterr()
    assert out == "[default0]:one\n[default0]:three\n[default0]:five\n"
    assert err == ""
    found = {str(path.relative_to(folder / "round_1")): path.read_text() for path in folder.rglob("*.log")}
    assert found == {
        "rank_0/stdout.log": "one\nthree\nfive",
        "rank_0/stderr.log": "two\nfour\n",
        "rank_1/stdout.log": "one\nthree\nfive",
        "rank_1/stderr.log": "two\nfour\n",
        "rank_2/output.log": "one\ntwo\nthree\nfour\nfive",
    }


async def test_output_without_a_reader_is_dropped() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    console = Console()
    for _ in range(100):
        console.write(writing, b"x" * 100_000 + b"\n")
    await asyncio.wait_for(console.close(idle_timeout=600, timeout=600), 30)
    assert not console.full
    os.close(writing)


async def test_the_last_output_of_a_worker_is_forwarded_to_a_slow_reader() -> None:
    reading, writing = os.pipe()
    console = Console()
    pipe = LogPipe(prefix=b"[rank 0] ", console=console, descriptor=writing, file=None)
    output = WorkerOutput(pipe, pipe, Path("error.json"))
    while not console.full:
        console.write(writing, b"x" * 1000 + b"\n")
    os.write(pipe.write_fd, b"first words\n")
    await poll_until(lambda: pipe.tail)  # from now on, nothing reads the output
    os.write(pipe.write_fd, b"last words\n")
    output.close_descriptors()
    await output.drain(0)
    assert output.tail().endswith("last words\n")
    output.close()
    received = bytearray()

    def read_slowly() -> None:
        while data := os.read(reading, 1 << 17):
            received.extend(data)
            time.sleep(0.1)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    await console.close(idle_timeout=0.5, timeout=60)  # less than the time to read everything
    os.close(writing)
    reader.join()
    assert received.endswith(b"[rank 0] first words\n[rank 0] last words\n")
    os.close(reading)


async def test_a_full_disk_loses_the_log_file_but_not_the_console(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "logs/round_1/rank_0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").symlink_to("/dev/full")
    await run(LogSettings(tmp_path / "logs", tee={0: Streams.BOTH}), tmp_path, BOTH_STREAMS)
    assert capfd.readouterr().out == "[default0]:one\n[default0]:three\n[default0]:five\n"
    assert (folder / "stderr.log").read_text() == "two\nfour\n"
    [warning] = caplog.messages
    assert f"{folder}/stdout.log cannot be written: No space left on device." in warning


async def test_what_is_not_text_is_shown_as_replacement_characters_but_saved_as_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = 'import os\nos.write(1, b"a\\xff\\x80b\\x1b[0m caf\\xc3")\nos.write(1, b"\\xa9\\nend\\xc3")'
    await run(LogSettings(tmp_path / "logs", tee={0: Streams.BOTH}), tmp_path, source)
    assert capfd.readouterr().out == "[default0]:a\ufffd\ufffdb\x1b[0m café\n[default0]:end\ufffd\n"
    saved = (tmp_path / "logs/round_1/rank_0/stdout.log").read_bytes()
    assert saved == b"a\xff\x80b\x1b[0m caf\xc3\xa9\nend\xc3"
