"""What a program or a tenant writes cannot control the terminal, or forge a section of ``elasticjob describe``."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator.client.cluster import view_of
from elastic_operator.views.formatting import LogFilter, description, visible
from tests.unit.operator.client.test_cli_cluster import NOW, job

HOSTILE = "\x1b[2J\x1b]0;title\x07RuntimeError\u202e\nEvents:\r\n  Normal   forged\x9b31m"


def hostile_job() -> dict[str, Any]:
    made = job()
    made["metadata"]["annotations"] = {"note": HOSTILE}
    made["status"]["lastFailure"]["message"] = HOSTILE
    for condition in made["status"]["conditions"]:
        condition["message"] = HOSTILE
    return made


def test_messages_of_a_job_forge_no_section_and_reach_the_terminal_as_characters() -> None:
    shown = visible("\n".join(description(view_of(hostile_job()), NOW)))
    assert "RuntimeError" in shown
    assert [line for line in shown.splitlines() if line.startswith("Events")] == ["Events: none"]
    assert not {"\x1b", "\x9b", "\r", "\x07", "\u202e"} & {*shown}


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_a_followed_log_keeps_its_colors_and_progress_bars_and_loses_other_sequences(size: int) -> None:
    output = b"\x1b[1;31mred\x1b[0m\t10%\r20%\x1b[2J\x1b[5;5H\x1b]52;c;Y2F0\x07\x1bc\xe2\x80\xae \xc3\xa9\x00end\n"
    log = LogFilter()
    pieces = [log.filtered(output[start : start + size]) for start in range(0, len(output), size)]
    assert b"".join(pieces) == b"\x1b[1;31mred\x1b[0m\t10%\r20% \xc3\xa9end\n"
