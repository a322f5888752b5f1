"""Telling the agent of an exception through the file named by TORCHELASTIC_ERROR_FILE, as torch's ``@record`` does."""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import Final

VARIABLE: Final = "TORCHELASTIC_ERROR_FILE"

_MESSAGE_LIMIT: Final = 8 << 10
_TRACE_LIMIT: Final = 32 << 10


def write(error: BaseException) -> None:
    """Tell of an exception that nobody caught, unless ``@record`` has done so."""
    name, text = type(error).__qualname__, str(error)
    write_message(f"{name}: {text}" if text else name, "".join(traceback.format_exception(error)))


def write_message(message: str, trace: str = "") -> None:
    """Tell why the process ends; written in full or not at all, and never in the place of what stands there."""
    path = os.environ.get(VARIABLE)
    if not path or Path(path).exists():
        return
    record = {
        "message": {
            "message": _bounded(message, _MESSAGE_LIMIT),
            "extraInfo": {"py_callstack": _bounded(trace, _TRACE_LIMIT), "timestamp": str(int(time.time()))},
        }
    }
    partial = Path(f"{path}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.rename(path)
    except OSError:
        return  # the end of what it prints tells the same


def _bounded(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 3]}\n…\n{text[-(limit * 2 // 3) :]}"
