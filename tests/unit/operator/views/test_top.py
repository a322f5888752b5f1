"""``elasticjob top``: combining the agents' metrics, rates between readings, and the output."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from elastic_operator.cli.commands import TopView
from elastic_operator.client import ScrapedJob
from elastic_operator.errors import ClusterError
from elastic_operator.views import formatting
from elastic_operator.views.job_view import PodView
from elastic_operator.views.top import (
    JobMetrics,
    MetricsPage,
    RateTracker,
    Tally,
    job_lines,
    jobs_table,
    scrape,
)
from tests.support.agent_pages import LEADS, agent_page
from tests.support.cluster_objects import START
from tests.support.snapshots import view
from torchelastic.metrics.series import GPU_MEMORY_TOTAL, GPU_MEMORY_USED, GPU_UTILIZATION

if TYPE_CHECKING:
    from collections.abc import Sequence

NOW = START + 100


def combined(
    *texts: str, at: float = NOW, rates: RateTracker | None = None, notes: Sequence[str] = (), **about: Any
) -> JobMetrics:
    """Return a reading of agents with these pages."""
    pages = [MetricsPage(f"digits-{number}-aaaaa", text) for number, text in enumerate(texts)]
    return JobMetrics(view(**about), pages, at, rates or RateTracker(), notes)


# -- combining the pages of the agents


def test_a_recovery_that_every_node_counts_is_counted_once() -> None:
    metrics = combined(agent_page(0, recoveries=(0.4, 2)), agent_page(1, recoveries=(0.2, 1)))
    assert metrics.recoveries["worker_failed"].count == 2
    assert metrics.recoveries["worker_failed"].mean == pytest.approx(0.2)


def test_a_recovery_ends_with_the_last_node() -> None:
    metrics = combined(agent_page(0, recoveries=(0.4, 2)), agent_page(1, recoveries=(3.0, 2)))
    assert metrics.recoveries["worker_failed"] == Tally(3.0, 2)


def test_a_rank_that_moved_is_shown_on_its_current_pod() -> None:
    gone = agent_page(0, 2, memory=None, steps=(9.0, 3))
    metrics = combined(gone, agent_page(0, steps=(1.0, 10), round=4), agent_page(1, round=4))
    assert [(each.rank, each.pod) for each in metrics.ranks] == [(0, "digits-1-aaaaa"), (1, "digits-2-aaaaa")]
    assert metrics.ranks[0].steps == Tally(1.0, 10)
    assert metrics.ranks[1].steps is None


@pytest.mark.parametrize("page", ["<html>", "torchelastic_round{ 3", "torchelastic_round many\n", f"a 1 {'9' * 400}\n"])
def test_an_invalid_page_is_reported_in_one_sentence(page: str) -> None:
    with pytest.raises(ClusterError, match="cannot be read as metrics"):
        MetricsPage("digits-0-aaaaa", page)


@pytest.mark.parametrize("rank", ["9" * 5000, "9" * 10, "-1", "x", ""])
def test_an_invalid_rank_is_left_out(rank: str) -> None:
    page = agent_page(0, steps=(2.0, 100))
    metrics = combined(page.replace('rank="0"', f'rank="{rank}"'), agent_page(1))
    assert [each.rank for each in metrics.ranks] == [1]


# -- rates between two readings


def test_the_step_time_is_the_mean_since_the_last_reading() -> None:
    tracker = RateTracker()

    def mean(*steps: float) -> float:
        return combined(agent_page(0, steps=steps), rates=tracker).rates.steps[0]

    assert mean(10.0, 10) == 1.0, "the first reading shows the mean of all steps"
    assert mean(11.0, 14) == 0.25
    assert mean(11.0, 14) == 0.25, "without new steps the last mean is kept"
    assert mean(1.0, 2) == 0.5, "after the pod was replaced, the mean starts again"


def test_a_rank_that_takes_much_longer_than_the_others_straggles() -> None:
    def straggler(*steps: float) -> int | None:
        return combined(*(agent_page(rank, steps=(step, 1)) for rank, step in enumerate(steps))).rates.straggler

    assert straggler(1.0, 1.0, 1.3) == 2
    assert straggler(1.0, 1.05) is None
    assert straggler(1.0) is None
    assert straggler(2.0, 1.0) == 0


def test_the_latest_recovery_is_known_if_it_was_observed() -> None:
    tracker = RateTracker()
    for _ in range(2):
        assert combined(agent_page(0, recoveries=(1.0, 2)), rates=tracker).rates.recoveries == {}
    assert combined(agent_page(0, recoveries=(1.5, 3)), rates=tracker).rates.recoveries == {"worker_failed": 0.5}


# -- the output


def test_a_job_is_shown_with_all_its_metrics() -> None:
    metrics = combined(
        agent_page(0, seconds=LEADS, lost=4.0, steps=(2.0, 100), recoveries=(3.0, 1), restarts=(0.08, 1)),
        agent_page(1, steps=(3.0, 100), memory=2e9),
        notes=["digits-2-ddddd: its agent does not answer in time"],
    )
    assert job_lines(metrics) == [
        "digits  Running  1m40s",
        "round 3   world size 2 on 2 nodes, 3 desired   pods ready 2/3   restarts 2 charged, 3 uncharged, 98 left",
        "",
        "goodput 86.0 %   lost 4s",
        "training 1m30s (90.0 %)   starting 5s (5.0 %)   rendezvous 1s (1.0 %)   waiting 4s (4.0 %)",
        "",
        "RECOVERIES AFTER   COUNT   MEAN   LAST   AGENT",
        "worker failed      1       3s     3s     80ms",
        "",
        "RANK   POD              STEP   MEMORY     CHECKPOINTS",
        "0      digits-0-aaaaa   20ms   572 MiB    -",
        "1      digits-1-aaaaa   30ms   1.86 GiB   -             straggles",
        "",
        "digits-2-ddddd: its agent does not answer in time",
    ]


@pytest.mark.parametrize(
    ("seconds", "mean"), [(LEADS, "no steps reported"), (LEADS | {"restoring": 5.0}, "-")], ids=["never", "not yet"]
)
def test_without_a_step_only_the_agents_share_of_a_recovery_is_shown(seconds: dict[str, float], mean: str) -> None:
    lines = job_lines(combined(agent_page(0, seconds=seconds, lost=0.0, restarts=(0.24, 3))))
    [shown] = [line for line in lines if line.startswith("worker failed")]
    assert shown.split() == ["worker", "failed", "3", *mean.split(), "-", "80ms"]


def test_a_job_that_reports_no_checkpoints_has_no_goodput() -> None:
    metrics = combined(agent_page(0, seconds=LEADS))
    assert job_lines(metrics)[3:5] == [
        "goodput -   no checkpoints reported",
        "training 1m30s (90.0 %)   starting 5s (5.0 %)   rendezvous 1s (1.0 %)   waiting 4s (4.0 %)",
    ]
    assert jobs_table([metrics])[1].split()[5:7] == ["-", "-"]


def test_escape_sequences_in_labels_do_not_reach_the_terminal() -> None:
    odd = "\x1b[31mred\x1b[0m\\n\x1b]0;title\x07\x9b2J" + "x" * 100
    own = [(GPU_UTILIZATION, {"gpu": "odd"}, (0.5,))]
    page = agent_page(0, seconds={"training": 90.0, "odd": 10.0}, recoveries=(0.4, 2), own=own)
    page = page.replace("worker_failed", odd).replace('"odd"', f'"{odd}"')
    found = job_lines(combined(page))
    cut = ("red2J" + "x" * 100)[:60]
    assert len([line for line in found if cut in line]) == 3
    assert not [line for line in found if not line.isprintable()]


def test_gpus_are_shown_if_there_are_any() -> None:
    values = {GPU_MEMORY_USED: 8e9, GPU_MEMORY_TOTAL: 8e10, GPU_UTILIZATION: 0.93}
    own = [(series, {"gpu": "0"}, (value,)) for series, value in values.items()]
    assert job_lines(combined(agent_page(own=own)))[3:] == [
        "GPU   POD              MEMORY                 BUSY",
        "0     digits-0-aaaaa   7.45 GiB of 74.5 GiB   93.0 %",
    ]


BREAKDOWN = {"asOf": "2023-11-14T22:13:40Z", "seconds": {"training": 10.0, "suspended": 5.0}, "lostSeconds": 1.0}
"""The time breakdown of the first 20 seconds, as in a status."""


def test_a_suspended_job_has_the_time_breakdown_of_its_status() -> None:
    suspended = {"state": "Suspended", "conditions": [{"type": "Suspended", "status": "True"}]}
    assert job_lines(combined(status={**suspended, "timeBreakdown": BREAKDOWN, "unchargedRestarts": 7})) == [
        "digits  Suspended  1m40s",
        "round 4   world size 2   pods ready 2/3   restarts 1 charged, 7 uncharged",
        "",
        "goodput 9.5 %   lost 1s",
        "training 10s (10.5 %)   suspended 1m25s (89.5 %)",
    ]
    assert len(job_lines(combined())) == 2


def test_a_finished_job_has_the_time_breakdown_of_its_status() -> None:
    ended = {"state": "Succeeded", "completionTime": "2023-11-14T22:13:40Z", "timeBreakdown": BREAKDOWN}
    assert job_lines(combined(status=ended))[2:] == [
        "",
        "goodput 60.0 %   lost 1s",
        "training 10s (66.7 %)   suspended 5s (33.3 %)",
    ]


def test_the_time_breakdown_from_before_a_resumption_is_not_shown() -> None:
    stopping = {"type": "Suspended", "status": "False", "reason": "Stopping"}
    shown = combined(status={"state": "Suspended", "timeBreakdown": BREAKDOWN, "conditions": [stopping]})
    assert job_lines(shown) == [
        "digits  Suspended  1m40s",
        "round 4   world size 2   pods ready 2/3   restarts 1 charged, 0 uncharged",
    ]
    assert jobs_table([shown])[1].split()[-5:-1] == ["-", "-", "1", "-"]


def test_only_the_first_of_many_ranks_and_the_straggler_are_shown() -> None:
    lines = job_lines(combined(agent_page(*range(100), steps=(2.0, 100)), agent_page(100, steps=(9.0, 100))))
    ranks = lines[lines.index(next(line for line in lines if line.startswith("RANK"))) + 1 :]
    assert (len(ranks), ranks[-1]) == (65, "and 37 more ranks")
    assert ranks[0].startswith("100 ")
    assert ranks[0].endswith("straggles")


def test_a_bar_as_wide_as_the_terminal_shows_the_time_by_state() -> None:
    class Jobs:
        def scrape(self, _: str) -> list[ScrapedJob]:
            return [ScrapedJob(view(), [MetricsPage("digits-0-aaaaa", agent_page(0, seconds=LEADS))])]

    top = TopView(Jobs(), "digits")  # type: ignore[arg-type]
    top.read()
    text = top.text(80)
    [bar] = [line for line in text.split("\n") if "█" in line.plain]
    spans = sorted(bar.spans)
    assert [(span.end - span.start, span.style) for span in spans] == [
        *((72, "green"), (4, "blue"), (1, "magenta"), (3, "yellow"))
    ]


def test_each_job_has_a_line() -> None:
    listed = combined(agent_page(0, seconds=LEADS, lost=4.0, steps=(2.0, 100)))
    header, first, second = jobs_table([listed, combined()])
    assert header.split() == ["NAME", "STATE", "READY", "ROUND", "WORLD", "GOODPUT", "LOST", "RESTARTS", "STEP", "AGE"]
    assert first.split() == ["digits", "Running", "2/3", "3", "2", "86.0", "%", "4s", "2+3", "20ms", "1m40s"]
    assert second.split() == ["digits", "Running", "2/3", "4", "2", "-", "-", "1", "-", "1m40s"]
    assert jobs_table([listed], namespaces=True)[1].split()[0] == "default"


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        *((0, "0s"), (0.000421, "0.421ms"), (0.0123, "12.3ms"), (0.9999, "1s"), (1.52, "1.52s"), (59.9, "59.9s")),
        (125, "2m05s"),
    ],
)
def test_short_durations_have_three_digits(seconds: float, written: str) -> None:
    assert formatting.short_duration(seconds) == written


# -- fetching the pages


def pods(*names: str) -> list[PodView]:
    return [
        PodView(name=name, index=number, ready=True, phase="Running", created=number, metrics_url="http://x:1/metrics")
        for number, name in enumerate(names)
    ]


async def test_pods_that_hang_delay_no_others() -> None:
    hung = {f"hung-{number}" for number in range(100)}

    async def fetch(pod: PodView) -> str:
        if pod.name in hung:
            await asyncio.Event().wait()
        return agent_page(0, seconds=LEADS)

    async with asyncio.timeout(30):
        [(one, one_note)] = await scrape([(pods("a", "hung-7", "b"), fetch)], timeout=0.2)
        [(many, many_note)] = await scrape([(pods(*sorted(hung), "z"), fetch)], timeout=2.0)
        jobs = [(pods("hung-0"), fetch), (pods("hung-0", "a"), fetch), (pods("b"), fetch)]
        leaders = await scrape(jobs, leaders=True, timeout=0.5)
    assert ([page.pod for page in one], one_note) == (["a", "b"], ["hung-7: its agent does not answer in time"])
    assert ([page.pod for page in many], many_note) == (
        ["z"],
        ["hung-0 and 99 more pods: its agent does not answer in time"],
    )
    assert [[page.pod for page in pages] for pages, _ in leaders] == [[], ["a"], ["b"]]


async def test_the_list_of_jobs_reads_the_leader_and_few_other_pods() -> None:
    asked: list[str] = []

    async def fetch(pod: PodView) -> str:
        asked.append(pod.name)
        return agent_page(0, seconds=LEADS if pod.name == "b" else None)

    [(found, _)] = await scrape([(pods("a", "b", "c"), fetch)], leaders=True)
    assert [page.pod for page in found] == ["a", "b", "c"]
    asked.clear()
    [(found, _)] = await scrape([(pods("v", "w", "x", "y", "z"), fetch)], leaders=True)
    assert len(found) == len(asked) == 3
