"""What the operator's log looks like, and what of kopf's is in it."""

from __future__ import annotations

import json
import logging

from elastic_operator.kubernetes.main import JsonLines, KopfFilter, TextLines


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
    calm = KopfFilter()
    unreachable = "Unreachable(ConnectionKey(host='127.0.0.1', port=6443, is_ssl=True), OSError(111, 'refused'))"
    starting = "APIServerError('storage is (re)initializing', {'kind': 'Status'}, status=429)"
    assert not calm.filter(a_record("Initial authentication has been initiated.", logging.INFO))
    assert not calm.filter(a_record("OS signals are ignored: running not in the main thread."))
    assert not calm.filter(a_record("Watcher for pods.v1@none has failed: 404 page not found", logging.ERROR))

    first = a_record(f"Request attempt #1/9 failed; will retry: GET /pods -> {unreachable}", logging.ERROR, error=True)
    assert calm.filter(first)
    assert first.getMessage() == (
        "watching: a request failed and is made again: the API server cannot be reached (Unreachable)"
    )
    assert (first.levelname, first.exc_info) == ("WARNING", None)
    second = f"Request attempt #2/9 failed; will retry: GET /services -> {unreachable}"
    assert not calm.filter(a_record(second, logging.ERROR))
    third = a_record(f"Request attempt #3/9 failed; will retry: GET /pods -> {starting}", logging.ERROR)
    assert calm.filter(third)
    assert third.getMessage() == "watching: a request failed and is made again: storage is (re)initializing"
    assert calm.filter(a_record("Something else is odd."))
