"""Write a worker's exception to the file named by TORCHELASTIC_ERROR_FILE, as torch's ``@record`` does."""

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
    """Write an uncaught exception, unless ``@record`` has written it."""
    name, text = type(error).__qualname__, _text_of(error)
    trace = "".join(traceback.format_exception(error))
    write_message(f"{name}: {text}" if text else name, trace, final=is_final(error))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever the program's own class does
        return ""


def is_final(error: BaseException) -> bool:
    """Whether this exception says that a restart is of no use."""
    module = sys.modules.get("torchelastic.training.non_retryable")
    return module is not None and isinstance(error, module.NonRetryableException)


def write_message(message: str, trace: str = "", *, final: bool = False) -> None:
    """Write why the process ends, whole or not at all, unless the file exists.

    Args:
        message: the exception, or another reason.
        trace: its traceback.
        final: a restart is of no use. Unlike the rest, this is added to an existing file: ``@record`` does not know it.
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
    with contextlib.suppress(OSError):  # its output tells the same
        _put(path, {"message": {"message": _bounded(message, _MESSAGE_LIMIT), "extraInfo": details}})


def _mark_final(path: str) -> None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not written by @record
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        record["message"]["extraInfo"]["final"] = True
        _put(path, record)


def _put(path: str, record: dict[str, Any]) -> None:
    partial = Path(f"{path}.{os.getpid()}")
    partial.write_text(json.dumps(record), encoding="utf-8")
    partial.rename(path)


def _bounded(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 3]}\n…\n{text[-(limit * 2 // 3) :]}"
