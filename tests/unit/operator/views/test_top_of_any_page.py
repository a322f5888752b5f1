"""``elasticjob top`` with any metrics page: it reports errors and shows the rest."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_operator.errors import ClusterError
from elastic_operator.views.top import MAX_PAGE, JobMetrics, MetricsPage, RateTracker, job_lines, jobs_table
from tests.support.agent_pages import LEADS, agent_page
from tests.support.cluster_objects import START
from tests.support.snapshots import view
from torchelastic.metrics.series import GPU_UTILIZATION

NOW = START + 100
VALID = agent_page(0, seconds=LEADS, lost=4.0, steps=(2.0, 100))


def seen(*pages: MetricsPage) -> list[str]:
    """Return the lines of the job and of the list of jobs after two readings of these pages."""
    tracker = RateTracker()
    for at in (NOW - 2, NOW):
        metrics = JobMetrics(view(), pages, at, tracker)
    return [*job_lines(metrics), *jobs_table([metrics])]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("begin", "repeated", "end"),
    [
        ("# HELP x ", " of the group", "\n# TYPE x gauge\nx 1\n"),
        ("#", " ", "x\n"),
        ("x{", 'a="",', "} 1\n"),
        ("x{", ", ", "} 1\n"),
        ('x{rank="', '\\"', '"} 1\n'),
        ('x{rank="', "\x1b[0 ", '"} 1\n'),
        ("", "x", " 1\n"),
        ("x ", "9", "\n"),
    ],
    ids=["help", "comment", "labels", "commas", "quotes", "escape sequences", "name", "digits"],
)
def test_a_very_long_line_is_skipped_in_bounded_time(begin: str, repeated: str, end: str) -> None:
    size = MAX_PAGE - len(VALID) - 100
    found = seen(MetricsPage("a", f"{begin}{repeated * (size // len(repeated))}{end}{VALID}"))
    assert "goodput 86.0 %   lost 4s" in found


NUMBERS = st.sampled_from(
    ["NaN", "+Inf", "-Inf", "1e308", "-1e308", "1" + "0" * 400, "-5", "0", "1e-320", "1_000", "١٢", "1e15", "3"]
) | st.floats().map(str)
LABELS = (
    st.sampled_from(["\\n", "\x1b[31m", "²", "٣", "00", "-1", "9" * 9, "\\\\", '\\"', "", "\u202e", "}"]) | st.text()
)
OWN = [
    (GPU_UTILIZATION, {"gpu": "0"}, (0.5,)),
]
ANY = agent_page(0, seconds=LEADS, lost=4.0, steps=(2.0, 100), own=OWN, recoveries=(3.0, 3))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_page_is_shown_or_refused_with_a_sentence(data: st.DataObject) -> None:
    lines = []
    for line in ANY.splitlines():
        if "_bucket" in line:  # buckets are not read
            continue
        if not line.startswith("#") and data.draw(st.booleans()):
            name, bracket, rest = line.rpartition("} ")[0].partition('="')
            label = data.draw(LABELS) if bracket and data.draw(st.booleans()) else None
            labels = f'{name}="{rest if label is None else label + rest[rest.find(chr(34)) :]}' if bracket else name
            lines.append(f"{labels}}} {data.draw(NUMBERS)}")
        else:
            lines.append(line)
    try:
        found = seen(MetricsPage("a", "\n".join(lines) + "\n"))
    except ClusterError as error:
        found = [str(error)]
    assert found[0].startswith(("digits  Running  1m40s", "its response cannot be read as metrics"))
