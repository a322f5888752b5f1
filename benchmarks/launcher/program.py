"""Launches functions with one launcher: see :mod:`benchmarks.launcher`.

``program.py LAUNCHER CASE``: LAUNCHER is "torchelastic", "elastic_launch", a version of torchrunx, or "loopback". The
last line of the file "answer" is a JSON object with the measured seconds, and what the launcher raised.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch.distributed as dist

BYTES = 1 << 30
FAULT = Path("fault").resolve()
READY = Path("ready").resolve()

HOSTS = {
    "unresolvable": {"hostnames": ["no-such-host.invalid"]},
    "lengths": {"hostnames": ["localhost", "no-such-host.invalid"], "workers_per_host": [1]},
    "allocation": {"hostnames": "slurm"},
    "duplicate": {"hostnames": ["localhost", "localhost"]},
}


def trivial():
    """Return the rank."""
    return int(os.environ["RANK"])


def large(fault):
    """Return a large value; the clock starts before the launcher gets it."""
    value = bytes(BYTES)
    started(fault)
    return value


def started(fault):
    """Start the clock."""
    with open(fault, "w") as file:
        file.write(f"{time.monotonic()}")


def alive(seconds):
    """Send a heartbeat, if any are expected, and sleep."""
    if path := os.environ.get("TORCHELASTIC_HEARTBEAT_FILE"):
        os.utime(path)
    time.sleep(seconds)


def fail(case, fault, ready):
    """Fail in rank 1 while rank 0 sleeps, or waits in a collective."""
    import torch

    if case == "collective" and not dist.is_initialized():
        dist.init_process_group("gloo")
    if os.environ["RANK"] == "0":
        open(ready, "w").close()
        if case == "collective":
            dist.all_reduce(torch.ones(1))
        while True:
            alive(0.1)
    while not os.path.exists(ready):
        alive(0.01)
    alive(0.5)  # rank 0 sleeps, or waits in the collective
    started(fault)
    if case in ("killed", "stopped"):
        os.kill(os.getpid(), signal.SIGKILL if case == "killed" else signal.SIGSTOP)
    raise RuntimeError("the fault")


def launch(launcher, func, args=(), workers=2, **settings):
    """Call the function with a launcher."""
    settings = {"hostnames": ["localhost"], "workers_per_host": workers, "backend": "gloo", **settings}
    if launcher == "torchelastic":
        return trx.launch(func, args, **settings).rank(0)
    if launcher == "elastic_launch":
        config = LaunchConfig(1, 1, workers, run_id="run", rdzv_backend="c10d", rdzv_endpoint="localhost:0")
        return elastic_launch(config, func)(*args)[0]
    if launcher.startswith("0.2"):
        return torchrunx.launch(func, args, **settings).rank(0)
    return torchrunx.Launcher(**settings).run(func, *args).rank(0)


def loopback():
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


def measured(launcher, case):
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
        assert len(launch(launcher, large, (str(FAULT),), 1)) == BYTES
    elif case in HOSTS:
        launch(launcher, trivial, workers=1, **HOSTS[case])
    else:
        settings = {"heartbeat_timeout": 1.0} if case == "stopped" and launcher == "torchelastic" else {}
        launch(launcher, fail, (case, str(FAULT), str(READY)), **settings)
    return [time.monotonic() - began]


def main(launcher, case):
    """Measure a case, and write the answer."""
    began, raised = time.monotonic(), None
    try:
        seconds = measured(launcher, case)
    except Exception as error:
        seconds = [time.monotonic() - began]
        raised = f"{type(error).__name__}: {error}"
    if FAULT.exists():
        seconds = [time.monotonic() - float(FAULT.read_text())]
    Path("answer.tmp").write_text(json.dumps({"seconds": seconds, "raised": raised}))
    Path("answer.tmp").rename("answer")


if __name__ == "__main__":
    if sys.argv[1] == "torchelastic":
        import torchelastic.launcher as trx
    elif sys.argv[1] == "elastic_launch":
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    elif sys.argv[1] != "loopback":
        import torchrunx
    main(*sys.argv[1:])
