"""What the operator's log looks like: a line for people, or a JSON object for what collects logs.

kopf speaks of itself at length, and once for each watch where one sentence would do. What it says is let through only
where an administrator can do something about it, each sentence once in a while.
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Final

from elastic_operator.kube.options import LogFormat, LogLevel
from elastic_operator.status_json import rfc3339

_QUIET: Final = 300.0
"""Seconds in which the same sentence of kopf's is not repeated."""

_SAID_ELSEWHERE: Final = re.compile(
    r"OS signals are ignored|Unresolved resources cannot be served|Not enough permissions|.* has (failed|finished)"
)
"""What kopf warns of and is meant to be as it is, or is told better by whoever runs it."""

_FAILED_REQUEST: Final = re.compile(r"Request attempt .*? -> (?P<kind>\w+)\((?P<words>'[^']*'|\"[^\"]*\")?", re.DOTALL)


class TextLines(logging.Formatter):
    """``2026-01-31T12:00:00Z INFO  default/digits: …``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback below it where there is one."""
        line = f"{rfc3339(record.created)} {record.levelname:<7} {record.getMessage()}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the traceback where there is one."""

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


class Calm(logging.Filter):
    """Lets through what says something new and matters: no tracebacks, and no sentence twice in five minutes."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged; it is shortened on the way."""
        message = record.getMessage()
        if record.levelno < logging.WARNING or _SAID_ELSEWHERE.match(message):
            return False
        if (failed := _FAILED_REQUEST.match(message)) is not None:
            message = f"a request failed and is made again: {_words(failed)}"
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        now = time.monotonic()
        if now - self._said.get(message, float("-inf")) < _QUIET:
            return False
        self._said = {known: when for known, when in self._said.items() if now - when < _QUIET} | {message: now}
        record.msg, record.args = f"watching: {message}", ()
        record.exc_info = record.exc_text = None
        return True


def _words(failed: re.Match[str]) -> str:
    return str(failed["words"] or f"the API server cannot be reached ({failed['kind']})").strip("'\"")


def set_up(log_format: LogFormat, level: LogLevel) -> None:
    """Log to standard error, from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format is LogFormat.JSON else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.value.upper())
    if level is LogLevel.DEBUG:
        for talkative in ("asyncio", "aiohttp.access"):
            logging.getLogger(talkative).setLevel(logging.INFO)
        return
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it speaks of each event; what is dropped below costs time
    calm = Calm()
    handler.addFilter(lambda record: not record.name.startswith("kopf") or calm.filter(record))
