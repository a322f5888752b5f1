"""The format of the operator's log: text lines or JSON objects.

kopf's own messages are only logged if an administrator can act on them, and not repeated for each watch.
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Final

from elastic_operator.api.wire import rfc3339
from elastic_operator.kubernetes.options import LogFormat, LogLevel

_REPEAT_INTERVAL: Final = 300.0
"""Seconds in which a message of kopf is not repeated."""

_IGNORED: Final = re.compile(
    r"OS signals are ignored|Unresolved resources cannot be served|Not enough permissions|.* has (failed|finished)"
)
"""Warnings of kopf about what is intended, or what the informer logs itself."""

_FAILED_REQUEST: Final = re.compile(r"Request attempt .*? -> (?P<kind>\w+)\((?P<words>'[^']*'|\"[^\"]*\")?", re.DOTALL)


class TextLines(logging.Formatter):
    """``2026-01-31T12:00:00Z INFO  default/digits: …``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, with the traceback below it."""
        line = f"{rfc3339(record.created)} {record.levelname:<7} {record.getMessage()}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        fields = {
            "time": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class KopfFilter(logging.Filter):
    """Lets warnings through without tracebacks, and each at most once in five minutes."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged; it is shortened on the way."""
        message = record.getMessage()
        if record.levelno < logging.WARNING or _IGNORED.match(message):
            return False
        if (failed := _FAILED_REQUEST.match(message)) is not None:
            message = f"a request failed and is made again: {_words(failed)}"
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        now = time.monotonic()
        if now - self._said.get(message, float("-inf")) < _REPEAT_INTERVAL:
            return False
        self._said = {known: when for known, when in self._said.items() if now - when < _REPEAT_INTERVAL} | {
            message: now
        }
        record.msg, record.args = f"watching: {message}", ()
        record.exc_info = record.exc_text = None
        return True


def _words(failed: re.Match[str]) -> str:
    return str(failed["words"] or f"the API server cannot be reached ({failed['kind']})").strip("'\"")


def set_up(log_format: LogFormat, level: LogLevel) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format is LogFormat.JSON else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.value.upper())
    if level is LogLevel.DEBUG:
        for verbose in ("asyncio", "aiohttp.access"):
            logging.getLogger(verbose).setLevel(logging.INFO)
        return
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it logs every event
    kopf_filter = KopfFilter()
    handler.addFilter(lambda record: not record.name.startswith("kopf") or kopf_filter.filter(record))
