"""What the operator's log looks like, and what of kopf's is in it."""

from __future__ import annotations

import json
import logging

from elastic_operator.kube.log_lines import Calm, JsonLines, TextLines


def a_record(message: str, level: int = logging.WARNING, *, error: bool = False) -> logging.LogRecord:
    problem = ValueError("odd")
    trace = (ValueError, problem, problem.__traceback__) if error else None
    record = logging.LogRecord("kopf.x", level, "file", 1, message, (), trace)
    record.created = 1_700_000_000.0
    return record


def test_a_line_for_people_has_time_level_and_message() -> None:
    line = TextLines().format(a_record("this copy leads", logging.INFO))
    assert line == "2023-11-14T22:13:20Z INFO    this copy leads"


def test_a_traceback_stands_below_its_line_and_within_its_object() -> None:
    record = a_record("a defect", logging.ERROR, error=True)
    assert TextLines().format(record).endswith("ValueError: odd")
    assert TextLines().format(record).splitlines()[0] == "2023-11-14T22:13:20Z ERROR   a defect"
    told = json.loads(JsonLines().format(record))
    assert told.pop("traceback").endswith("ValueError: odd")
    assert told == {"time": "2023-11-14T22:13:20Z", "level": "error", "logger": "kopf.x", "message": "a defect"}


def test_of_kopf_only_what_matters_is_heard_once_and_without_tracebacks() -> None:
    calm = Calm()
    assert not calm.filter(a_record("Initial authentication has been initiated.", logging.INFO))
    assert not calm.filter(a_record("OS signals are ignored: running not in the main thread."))
    first = a_record("Request attempt #1/9 failed; will retry: GET /api -> refused", logging.ERROR, error=True)
    assert calm.filter(first)
    assert first.getMessage() == "watching: Request attempt #1/9 failed; will retry: GET /api -> refused"
    assert first.exc_info is None
    assert not calm.filter(a_record("Request attempt #2/9 failed; will retry: GET /api -> refused", logging.ERROR))
    assert calm.filter(a_record("Request attempt #1/9 failed; will retry: GET /apis -> refused", logging.ERROR))
