"""Launches functions with one launcher: see :mod:`benchmarks.launcher`.

``program.py LAUNCHER CASE``: LAUNCHER is "torchelastic", "elastic_launch", a version of torchrunx, or "loopback". The
last line of the file "answer" is a JSON object with the measured seconds, and what the launcher raised.
"""

import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BYTES = 1 << 30
FAULT = Path("fault").resolve()
READY = Path("ready").resolve()

MODULES = {"torchelastic": "torchelastic.launcher", "elastic_launch": "torch.distributed.launcher.api"}

HOSTS: dict[str, dict[str, Any]] = {
    "unresolvable": {"hostnames": ["no-such-host.invalid"]},
    "lengths": {"hostnames": ["localhost", "no-such-host.invalid"], "workers_per_host": [1]},
    "allocation": {"hostnames": "slurm"},
    "duplicate": {"hostnames": ["localhost", "localhost"]},
}


def trivial() -> int:
    """Return the rank."""
    return int(os.environ["RANK"])


def large(fault: Path) -> bytes:
    """Return a large value; the clock starts before the launcher gets it."""
    value = bytes(BYTES)
    started(fault)
    return value


def started(fault: Path) -> None:
    """Start the clock."""
    fault.write_text(f"{time.monotonic()}")


def alive(seconds: float) -> None:
    """Send a heartbeat, if any are expected, and sleep."""
    if path := os.environ.get("TORCHELASTIC_HEARTBEAT_FILE"):
        os.utime(path)
    time.sleep(seconds)


def fail(case: str, fault: Path, ready: Path) -> None:
    """Fail in rank 1 while rank 0 sleeps, or waits in a collective."""
    if case == "collective" and not dist.is_initialized():
        dist.init_process_group("gloo")
    if os.environ["RANK"] == "0":
        ready.touch()
        if case == "collective":
            dist.all_reduce(torch.ones(1))
        while True:
            alive(0.1)
    while not ready.exists():
        alive(0.01)
    time.sleep(0.5)  # rank 0 sleeps, or waits in the collective
    alive(0)
    started(fault)
    if case in ("killed", "stopped"):
        os.kill(os.getpid(), signal.SIGKILL if case == "killed" else signal.SIGSTOP)
    raise RuntimeError("the fault")


def launch(
    launcher: str,
    func: Callable[..., object],
    args: tuple[object, ...] = (),
    workers: int = 2,
    **settings: Any,  # noqa: ANN401 - the launcher's
) -> Any:  # noqa: ANN401 - the function's value
    """Call the function with a launcher, and return what rank 0 returned."""
    api = importlib.import_module(MODULES.get(launcher, "torchrunx"))
    settings = {"hostnames": ["localhost"], "workers_per_host": workers, "backend": "gloo", **settings}
    if hasattr(api, "launch"):
        return api.launch(func, args, **settings).rank(0)
    if launcher == "elastic_launch":
        config = api.LaunchConfig(1, 1, workers, run_id="run", rdzv_backend="c10d", rdzv_endpoint="localhost:0")
        return api.elastic_launch(config, func)(*args)[0]
    return api.Launcher(**settings).run(func, *args).rank(0)


def loopback() -> float:
    """Return the seconds in which a TCP connection of this machine transfers the bytes."""
    value = bytes(BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server:
        if os.fork() == 0:
            with socket.create_connection(server.getsockname()) as sender:
                sender.recv(1)
                sender.sendall(value)
            os._exit(0)
        connection, _ = server.accept()
        with connection:
            received = memoryview(bytearray(BYTES))
            began = time.monotonic()
            connection.send(b"1")
            while received:
                received = received[connection.recv_into(received) :]
            return time.monotonic() - began


def measured(launcher: str, case: str) -> list[float]:
    """Return the seconds of a case."""
    began = time.monotonic()
    if case == "launch":
        launch(launcher, trivial)
        first = time.monotonic()
        launch(launcher, trivial)
        return [first - began, time.monotonic() - first]
    if case == "large" and launcher == "loopback":
        return [loopback()]
    if case == "large":
        assert len(launch(launcher, large, (FAULT,), 1)) == BYTES
    elif case in HOSTS:
        launch(launcher, trivial, workers=1, **HOSTS[case])
    else:
        settings: dict[str, Any] = (
            {"heartbeat_timeout": 1.0} if case == "stopped" and launcher == "torchelastic" else {}
        )
        launch(launcher, fail, (case, FAULT, READY), **settings)
    return [time.monotonic() - began]


def main(launcher: str, case: str) -> None:
    """Measure a case, and write the answer."""
    if launcher != "loopback":
        importlib.import_module(MODULES.get(launcher, "torchrunx"))
    began, raised = time.monotonic(), None
    try:
        seconds = measured(launcher, case)
    except Exception as error:  # noqa: BLE001 - of any launcher
        seconds = [time.monotonic() - began]
        raised = f"{type(error).__name__}: {error}"
    if FAULT.exists():
        seconds = [time.monotonic() - float(FAULT.read_text())]
    Path("answer.tmp").write_text(json.dumps({"seconds": seconds, "raised": raised}))
    Path("answer.tmp").rename("answer")


if __name__ == "__main__":
    main(*sys.argv[1:])
