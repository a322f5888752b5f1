"""The error file of a process that an agent or another launcher started, in the format of torch's ``@record``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Final

from torchelastic.protocol.codec import shorten
from torchelastic.protocol.worker import ERROR_FILE

_RECORDED_MESSAGE: Final = 8 << 10
_RECORDED_TRACE: Final = 32 << 10


def record_message(message: str, trace: str = "", *, final: bool = False) -> None:
    """Write the error file atomically; an existing file, which may be of a process that this one ran, is replaced."""
    if not (path := os.environ.get(ERROR_FILE)):
        return
    details: dict[str, Any] = {"py_callstack": shorten(trace, _RECORDED_TRACE), "timestamp": str(int(time.time()))}
    if final:
        details["final"] = True
    record = {"message": {"message": shorten(message, _RECORDED_MESSAGE), "extraInfo": details}}
    with contextlib.suppress(OSError):  # the output contains the message, too
        partial = Path(f"{path}.{os.getpid()}")
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.rename(path)


def record_failure(message: str, error_file: Path | None) -> None:
    """Write the error file of the program that started this agent: a copy of a worker's error file, or a message."""
    path = os.environ.get(ERROR_FILE)
    if path and error_file is not None and error_file.is_file():
        with contextlib.suppress(OSError):
            shutil.copyfile(error_file, path)
    else:
        record_message(message)
