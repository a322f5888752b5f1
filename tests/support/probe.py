"""Write the arguments, environment and other properties of this process as JSON to the file that PROBE_OUT names."""

import contextlib
import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import torch

names = sorted(globals())


def descriptors() -> dict[str, str]:
    found = {}
    for link in sorted(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found[link.name] = str(link.readlink())
    return found


facts = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv[1:],
    "path": sys.path,
    "names": names,
    "file": __file__,
    "doc": __doc__,
    "package": __package__,
    "spec": [getattr(__spec__, name, None) for name in ("name", "origin", "parent", "cached", "has_location")],
    "loader": type(__loader__).__name__,
    "is main": sys.modules["__main__"].__dict__ is globals(),
    "folder": str(Path.cwd()),
    "environment": dict(os.environ),
    "umask": os.umask(0),
    "limits": {
        name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT")
    },
    "nice": os.nice(0),
    "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
    "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "descriptors": descriptors(),
    "streams": [(s.encoding, s.errors, s.name, s.mode) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "flags": str(sys.flags),
    "warnings": sys.warnoptions,
    "command line": Path("/proc/self/cmdline").read_text().split("\0"),
    "comm": Path("/proc/self/comm").read_text(),
    "leads a session": os.getsid(0) == os.getpid() == os.getpgid(0),
    "threads": [thread.name for thread in threading.enumerate()],
    "is main thread": threading.current_thread() is threading.main_thread(),
    "main thread is the process": threading.main_thread().native_id == os.getpid(),
    "process": multiprocessing.current_process().name,
    "start method": multiprocessing.get_start_method(allow_none=True),
    "hooks": [sys.excepthook is sys.__excepthook__, sys.stdout is sys.__stdout__],
    "gc": gc.isenabled(),
    "recursion": sys.getrecursionlimit(),
    "torch threads": torch.get_num_threads(),
    "cuda": torch.cuda.is_initialized(),
}
Path(os.environ["PROBE_OUT"]).write_text(json.dumps(facts))
