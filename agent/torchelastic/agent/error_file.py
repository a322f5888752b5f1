"""Telling the agent of an exception through the file named by TORCHELASTIC_ERROR_FILE, as torch's ``@record`` does."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "TORCHELASTIC_ERROR_FILE"

_MESSAGE_LIMIT: Final = 8 << 10
_TRACE_LIMIT: Final = 32 << 10


def write(error: BaseException) -> None:
    """Tell of an exception that nobody caught, unless ``@record`` has done so."""
    name, text = type(error).__qualname__, _text_of(error)
    trace = "".join(traceback.format_exception(error))
    write_message(f"{name}: {text}" if text else name, trace, final=is_final(error))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever the program's own class does
        return ""


def is_final(error: BaseException) -> bool:
    """Whether the program says by this exception that trying again is no use."""
    worker = sys.modules.get("torchelastic.worker")
    return worker is not None and isinstance(error, worker.NonRetryableException)


def write_message(message: str, trace: str = "", *, final: bool = False) -> None:
    """Tell why the process ends; written in full or not at all, and never in the place of what stands there.

    Args:
        message: the exception, or another reason.
        trace: where it was raised.
        final: whether trying again is no use. ``@record`` knows nothing of that, so it is added to what stands there.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    if Path(path).exists():
        if final:
            _mark_final(path)
        return
    details: dict[str, Any] = {"py_callstack": _bounded(trace, _TRACE_LIMIT), "timestamp": str(int(time.time()))}
    if final:
        details["final"] = True
    with contextlib.suppress(OSError):  # the end of what it prints tells the same
        _put(path, {"message": {"message": _bounded(message, _MESSAGE_LIMIT), "extraInfo": details}})


def _mark_final(path: str) -> None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # something else stands there
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        record["message"]["extraInfo"]["final"] = True
        _put(path, record)


def _put(path: str, record: dict[str, Any]) -> None:
    partial = Path(f"{path}.{os.getpid()}")
    partial.write_text(json.dumps(record), encoding="utf-8")
    partial.rename(path)


def _bounded(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 3]}\n…\n{text[-(limit * 2 // 3) :]}"
