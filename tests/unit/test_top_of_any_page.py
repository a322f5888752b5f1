"""Whatever the page of an agent holds, ``elasticjob top`` shows the rest, says what is wrong, and goes on meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_operator.errors import ClusterError
from elastic_operator.showing.agent_page import Page
from elastic_operator.showing.asking import LARGEST_PAGE, ask, ask_leaders
from elastic_operator.showing.figures import figures
from elastic_operator.showing.shown import Shown, ShownPod
from elastic_operator.showing.top_lines import Reading, lines, plain
from elastic_operator.showing.top_table import table
from elastic_operator.showing.trend import Trend
from tests.support.agent_pages import LEADS, agent_page, own_counter, own_gauge
from tests.support.snapshots import START, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = START + 100
HONEST = agent_page(0, seconds=LEADS, lost=4.0, steps=(2.0, 100), own=own_gauge("train.loss", {0: 0.5}))
SIZE = LARGEST_PAGE - len(HONEST)
SLOW = "a 1\n" * 100_000
"""Nothing but lines that take time."""


def seen(*pages: Page) -> list[str]:
    """What there is to see of a job whose agents show this: of it alone in both ways, and in the list of all."""
    trend = Trend()
    for at in (NOW - 2, NOW):
        told = figures(pages)
        reading = Reading(shown=Shown.of(snapshot()), figures=told, pace=trend.read(told, at), now=at)
    drawn = lines(reading, width=80, height=40, bar=True)
    return [*(plain(line) for line in (*drawn, *lines(reading))), *table([reading])]


def pods(*names: str) -> list[ShownPod]:
    return [
        ShownPod(name=name, index=number, ready=True, phase="Running", created=number, metrics_url="http://x:1/metrics")
        for number, name in enumerate(names)
    ]


def numbered(template: str, size: int = 1 << 20) -> str:
    """Lines with numbers in them; as many as can be read in time."""
    return "".join(template.format(number) for number in range(size // len(template)))


LONG_LINES = {
    "an explanation that says the same again and again": ("# HELP x ", " of the group", "\n# TYPE x gauge\nx 1\n"),
    "a comment of blanks": ("#", " ", "x\n"),
    "an explanation of blanks": ("# HELP", " ", "x\n"),
    "labels": ("x{", 'a="",', "} 1\n"),
    "labels without names": ("x{", ", ", "} 1\n"),
    "a label of escaped quotation marks": ('x{rank="', '\\"', '"} 1\n'),
    "a label of escape sequences": ('x{rank="', "\x1b[0 ", '"} 1\n'),
    "a name": ("", "x", " 1\n"),
    "digits": ("x ", "9", "\n"),
}
"""How a line begins, what comes again and again, and how it ends."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shape", LONG_LINES)
def test_a_line_of_any_length_takes_no_time_and_hides_nothing_else(shape: str) -> None:
    begin, again, end = LONG_LINES[shape]
    page = f"{begin}{again * ((SIZE - 100) // len(again))}{end}{HONEST}"
    assert LARGEST_PAGE * 0.9 < len(page) <= LARGEST_PAGE
    found = seen(Page("a", page))
    assert "goodput 86.0 %   lost 4s" in found
    assert "my_app train.loss   0.5" in found


MANY_LINES: dict[str, Callable[[], str]] = {
    "states": lambda: (
        "# TYPE torchelastic_job_seconds_total counter\n" + numbered('torchelastic_job_seconds_total{{state="{}"}} 1\n')
    ),
    "causes": lambda: (
        "# TYPE torchelastic_recovery_duration_seconds histogram\n"
        + numbered(
            'torchelastic_recovery_duration_seconds_sum{{cause="{0}"}} 1\n'
            'torchelastic_recovery_duration_seconds_count{{cause="{0}"}} 1\n'
        )
    ),
    "ranks": lambda: (
        "# TYPE torchelastic_worker_memory_bytes gauge\n"
        + numbered('torchelastic_worker_memory_bytes{{rank="{}"}} 1\n')
    ),
    "gpus": lambda: (
        "# TYPE torchelastic_gpu_utilization_ratio gauge\n"
        + numbered('torchelastic_gpu_utilization_ratio{{gpu="{}"}} 1\n')
    ),
    "own names": lambda: numbered(
        '# HELP x{0} {0} of the group b, as the program measures it.\n# TYPE x{0} gauge\nx{0}{{rank="0"}} 1\n'
    ),
    "buckets": lambda: numbered('x_bucket{{le="{}"}} 1\n'),
    "names": lambda: numbered("x{} 1\n"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shape", MANY_LINES)
def test_however_many_there_are_of_something_the_view_has_room_for_what_matters(shape: str) -> None:
    # With no limit on the time: on a slow machine it would be too much, and be said to be.
    found = seen(Page("a", HONEST + MANY_LINES[shape](), patience=60.0))
    assert found[0] == "digits  Running  1m40s"
    assert len(found) < 200


def test_a_page_that_takes_too_long_is_not_read_to_its_end() -> None:
    with pytest.raises(ClusterError, match="its page of metrics takes too long to read"):
        Page("a", HONEST, patience=0.0)


async def test_while_a_page_is_read_the_view_goes_on() -> None:
    goes_on = 0

    async def view() -> None:
        nonlocal goes_on
        while True:
            await asyncio.sleep(0)
            goes_on += 1

    async def fetch(_: ShownPod) -> str:
        return SLOW

    viewing = asyncio.create_task(view())
    one, notes = await ask(pods("a"), fetch)
    assert goes_on > 100
    goes_on = 0
    [others] = await ask_leaders([(pods("a"), fetch)])
    assert goes_on > 100
    viewing.cancel()
    assert (len(one), len(others), notes) == (1, 1, [])


async def test_those_that_show_little_do_not_wait_for_one_that_shows_much() -> None:
    async def fetch(pod: ShownPod) -> str:
        return {"little": HONEST, "much": SLOW, "more": SLOW * 2}[pod.name]

    found, notes = await ask(pods("more", "much", "little"), fetch, reading=0.001)
    assert "little" in [page.pod for page in found]
    assert notes[0] == "more: there was no time left to read its page of metrics"
    leaders = await ask_leaders([(pods(name), fetch) for name in ("more", "much", "little")], reading=0.001)
    assert [page.pod for pages in (leaders[0], leaders[2]) for page in pages] == ["little"]


async def test_what_is_wrong_with_a_page_is_said_in_a_line() -> None:
    async def fetch(_: ShownPod) -> str:
        return f"{HONEST}x{{{',' * 1000}}} 1\n"

    _, [note] = await ask(pods("a"), fetch)
    assert note.startswith("a: what it shows cannot be read as metrics (Invalid labels: ,,,")
    assert len(note) < 160


@pytest.mark.parametrize("spent", ["1e308", "-1e308", "-1", "NaN", "+Inf", "1" + "0" * 400, "1.1e11"])
def test_what_can_be_no_time_is_left_out(spent: str) -> None:
    page = agent_page(0, seconds=LEADS, lost=4.0, steps=(2.0, 100), recoveries=(0.3, 1))
    head = "# TYPE torchelastic_job_seconds_total counter\n"
    odd = "".join(f'torchelastic_job_seconds_total{{state="{state}"}} {spent}\n' for state in "xy")
    assert head in page
    assert "goodput 86.0 %   lost 4s" in seen(Page("a", page.replace(head, head + odd)))
    for told in ("_lost_seconds_total", "_recovery_duration_seconds_sum", "_operation_duration_seconds_sum"):
        replaced = "".join(
            f"{line.rpartition(' ')[0]} {spent}\n" if f"{told}{{" in line else f"{line}\n" for line in page.splitlines()
        )
        assert replaced != page
        found = seen(Page("a", replaced))
        assert found[0] == "digits  Running  1m40s"
        assert max(map(len, found)) < 130, found


NUMBERS = st.sampled_from(
    ["NaN", "+Inf", "-Inf", "1e308", "-1e308", "1" + "0" * 400, "-5", "0", "1e-320", "1_000", "١٢", "1e15", "3"]
) | st.floats().map(str)
LABELS = (
    st.sampled_from(["\\n", "\x1b[31m", "²", "٣", "00", "-1", "9" * 9, "\\\\", '\\"', "", "\u202e", "}"]) | st.text()
)
ANY = HONEST + "\n".join(
    [
        *own_counter("samples", {0: 3.0}),
        *own_gauge("step.ms", {0: 0.1}, series="my_app_step_seconds"),
        "# TYPE torchelastic_recovery_duration_seconds histogram",
        'torchelastic_recovery_duration_seconds_count{cause="x"} 3',
        'torchelastic_recovery_duration_seconds_sum{cause="x"} 3',
        "# TYPE torchelastic_gpu_utilization_ratio gauge",
        'torchelastic_gpu_utilization_ratio{gpu="0"} 0.5',
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_page_is_too_odd_to_be_shown_or_refused_in_words(data: st.DataObject) -> None:
    said = []
    for line in ANY.splitlines():
        if not line.startswith("#") and data.draw(st.booleans()):
            name, bracket, rest = line.rpartition("} ")[0].partition('="')
            label = data.draw(LABELS) if bracket and data.draw(st.booleans()) else None
            labels = f'{name}="{rest if label is None else label + rest[rest.find(chr(34)) :]}' if bracket else name
            said.append(f"{labels}}} {data.draw(NUMBERS)}")
        else:
            said.append(line)
    try:
        found = seen(Page("a", "\n".join(said) + "\n"))
    except ClusterError as error:
        found = [str(error)]
    assert found[0].startswith(("digits  Running  1m40s", "what it shows cannot be read as metrics"))
