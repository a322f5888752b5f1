"""``elasticjob top``: what the agents' pages come to, and how it is shown."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from elastic_operator.commands import get, top
from elastic_operator.errors import ClusterError
from elastic_operator.showing import quantities
from elastic_operator.showing.agent_page import Page, Tally
from elastic_operator.showing.asking import NotAllowed, ask, ask_leaders
from elastic_operator.showing.figures import Figures, RankFigures, figures, goodput
from elastic_operator.showing.shown import Shown, ShownPod
from elastic_operator.showing.top_lines import Reading, lines, plain
from elastic_operator.showing.top_table import table
from elastic_operator.showing.trend import Trend
from tests.support.agent_pages import LEADS, agent_page, own_counter, own_gauge
from tests.support.snapshots import START, pod, snapshot

NOW = START + 100


def pages(*texts: str) -> list[Page]:
    return [Page(f"digits-{number}-aaaaa", text) for number, text in enumerate(texts)]


def shown(told: Figures, *, at: float = NOW, trend: Trend | None = None, **about: Any) -> Reading:
    notes = about.pop("notes", ())
    pace = (trend or Trend()).read(told, at)
    return Reading(shown=Shown.of(snapshot(**about)), figures=told, pace=pace, now=at, notes=notes)


def text(reading: Reading, **room: Any) -> list[str]:
    return [plain(line) for line in lines(reading, **room)]


# -- what the pages come to


def test_the_leader_alone_tells_of_the_whole_job() -> None:
    told = figures(pages(agent_page(0), agent_page(1, seconds=LEADS, lost=4.0)))
    assert told.seconds == LEADS
    assert (told.lost, told.nodes, told.wanted, told.restarts, told.free) == (4.0, 2, 3, 2, 3)
    assert (told.epoch, told.world_size, told.remaining) == (3, 2, 98)
    assert told.goodput == pytest.approx(0.86)


def test_what_nobody_tells_is_not_zero() -> None:
    told = figures(pages(agent_page(0)))
    assert (told.seconds, told.lost, told.restarts, told.goodput) == ({}, None, None, None)
    assert figures([]) == Figures()
    assert figures(pages("", "# nothing\n")) == Figures()


def test_goodput_is_training_that_was_kept_over_all_time() -> None:
    assert goodput({"training": 80.0, "waiting": 20.0}, None) == 0.8
    assert goodput({"training": 80.0, "waiting": 20.0}, 30.0) == 0.5
    assert goodput({"training": 10.0}, 30.0) == 0.0
    assert goodput({}, None) is None


def test_a_recovery_that_every_node_saw_is_one() -> None:
    told = figures(pages(agent_page(0, recoveries=(0.4, 2)), agent_page(1, recoveries=(0.2, 1))))
    assert told.recoveries["worker_failed"].count == 2
    assert told.recoveries["worker_failed"].mean == pytest.approx(0.2)


def test_ranks_are_those_that_live_and_a_rank_that_moved_is_where_it_lives() -> None:
    gone = agent_page(0, 2, memory=None, steps=(9.0, 3))
    told = figures(pages(gone, agent_page(0, steps=(1.0, 10), epoch=4), agent_page(1, epoch=4)))
    assert [(each.rank, each.pod) for each in told.ranks] == [(0, "digits-1-aaaaa"), (1, "digits-2-aaaaa")]
    assert told.ranks[0].steps == Tally(1.0, 10)
    assert told.ranks[1].steps is None


def test_own_names_are_those_of_the_program_by_group() -> None:
    own = [
        *own_gauge("train.loss", {0: 0.5}),
        *own_counter("samples", {0: 64.0}),
        *own_gauge("step of the group one.ms", {0: 0.25}, of="other", series="other_seconds"),
    ]
    told = figures(pages(agent_page(0, own=own), agent_page(1, own=own_gauge("train.loss", {1: 0.25}))))
    assert [(each.group, each.name, each.kind, each.seconds) for each in told.own] == [
        ("my_app", "samples", "counter", False),
        ("my_app", "train.loss", "gauge", False),
        ("other", "step of the group one.ms", "gauge", True),
    ]
    assert told.own[1].values == {0: 0.5, 1: 0.25}


@pytest.mark.parametrize("page", ["<html>", "torchelastic_epoch{ 3", "torchelastic_epoch many\n", f"a 1 {'9' * 400}\n"])
def test_a_page_that_is_none_is_told_in_a_sentence(page: str) -> None:
    with pytest.raises(ClusterError, match="cannot be read as metrics"):
        Page("digits-0-aaaaa", page)


# -- from one reading to the next


def test_steps_are_those_since_the_last_reading() -> None:
    trend = Trend()
    first = trend.read(figures(pages(agent_page(0, steps=(10.0, 10)))), 0.0)
    assert first.steps == {0: 1.0}, "at first the mean of all"
    assert trend.read(figures(pages(agent_page(0, steps=(11.0, 14)))), 2.0).steps == {0: 0.25}
    assert trend.read(figures(pages(agent_page(0, steps=(11.0, 14)))), 4.0).steps == {0: 0.25}, "no step ended"
    assert trend.read(figures(pages(agent_page(0, steps=(1.0, 2)))), 6.0).steps == {0: 0.5}, "another pod"


def test_what_is_remembered_does_not_grow_with_the_names_that_a_pod_makes_up() -> None:
    trend = Trend()
    sizes = []
    for at in range(4000):
        ranks = (
            RankFigures(rank=0, pod="a", steps=Tally(at, at + 1)),
            RankFigures(rank=at, pod=f"pod-{at}", steps=Tally(1.0, 1)),
        )
        trend.read(Figures(ranks=ranks, recoveries={f"cause {at}": Tally(1.0, 1)}), float(at))
        if at % 50 == 0:
            sizes.append(len(pickle.dumps(trend)))
    assert max(sizes[40:]) <= max(sizes[:40]) * 1.1
    assert trend.read(Figures(ranks=(RankFigures(rank=0, pod="a", steps=Tally(4002, 4002)),)), 4000.0).steps[0] == 1.5


def test_a_rank_that_takes_much_longer_than_the_others_straggles() -> None:
    def straggler(*steps: float) -> int | None:
        told = figures(pages(*(agent_page(rank, steps=(step, 1)) for rank, step in enumerate(steps))))
        return Trend().read(told, 0.0).straggler

    assert straggler(1.0, 1.0, 1.3) == 2
    assert straggler(1.0, 1.05) is None
    assert straggler(1.0) is None
    assert straggler(2.0, 1.0) == 0


def test_a_counter_that_begins_anew_has_no_rate() -> None:
    trend = Trend()

    def rates(at: float, value: float) -> Any:
        return trend.read(figures(pages(agent_page(0, own=own_counter("samples", {0: value})))), at).rates

    assert rates(0.0, 100.0) == {}
    assert rates(2.0, 300.0) == {("my_app", "samples"): 100.0}
    assert rates(4.0, 10.0) == {}
    assert rates(6.0, 10.0) == {("my_app", "samples"): 0.0}


def test_the_last_recovery_is_known_once_it_was_watched() -> None:
    trend = Trend()
    assert trend.read(figures(pages(agent_page(0, recoveries=(1.0, 2)))), 0.0).recoveries == {}
    assert trend.read(figures(pages(agent_page(0, recoveries=(1.5, 3)))), 2.0).recoveries == {"worker_failed": 0.5}


# -- how it is shown


def test_a_job_is_shown_with_all_its_figures() -> None:
    own = [*own_gauge("train.loss", {0: 0.5, 1: 0.25}), *own_counter("samples", {0: 100.0, 1: 28.0})]
    told = figures(
        pages(
            agent_page(0, seconds=LEADS, lost=4.0, steps=(2.0, 100), own=own, recoveries=(0.3, 1)),
            agent_page(1, steps=(3.0, 100), memory=2e9),
        )
    )
    assert text(shown(told, notes=["digits-2-ddddd: its agent does not answer in time"])) == [
        "digits  Running  1m40s",
        "epoch 3   world size 2 on 2 nodes, 3 wanted   pods ready 2/3   restarts 2 charged, 3 free, 98 left",
        "",
        "goodput 86.0 %   lost 4s",
        "training 1m30s (90.0 %)   starting 5s (5.0 %)   rendezvous 1s (1.0 %)   waiting 4s (4.0 %)",
        "",
        "RECOVERIES AFTER   COUNT   MEAN    LAST",
        "worker failed      1       300ms   300ms",
        "",
        "RANK   POD              STEP   MEMORY     CHECKPOINTS",
        "0      digits-0-aaaaa   20ms   572 MiB    -",
        "1      digits-1-aaaaa   30ms   1.86 GiB   -             straggles",
        "",
        "MEASURED            VALUE",
        "my_app samples      128",
        "my_app train.loss   0.5     0.25 to 0.5 over the ranks",
        "",
        "digits-2-ddddd: its agent does not answer in time",
    ]


def test_whatever_a_program_measures_is_shown() -> None:
    values = {0: float("nan"), 1: float("inf"), 2: -3.0, 3: 1e300}
    for series in ("my_app_loss", "my_app_loss_seconds"):
        own = own_gauge("lo\\nss\x1b[31m", values, series=series)
        [line] = [line for line in text(shown(figures(pages(agent_page(0, own=own))))) if line.startswith("my_app lo")]
        assert line.startswith("my_app loss")
        assert "nan" in line


def test_what_a_page_says_in_its_labels_reaches_no_terminal_as_it_is() -> None:
    odd = "\x1b[31mred\x1b[0m\\n\x1b]0;title\x07\x9b2J" + "x" * 100
    page = agent_page(0, seconds={"training": 90.0, odd: 10.0}, recoveries=(0.4, 2)).replace("worker_failed", odd)
    page += f'# TYPE torchelastic_gpu_utilization_ratio gauge\ntorchelastic_gpu_utilization_ratio{{gpu="{odd}"}} 0.5\n'
    found = text(shown(figures(pages(page))))
    cut = ("red2J" + "x" * 100)[:60]
    assert len([line for line in found if cut in line]) == 3
    assert not [line for line in found if not line.isprintable()]


def test_values_that_are_written_without_a_point_are_shown() -> None:
    own = [
        *own_gauge("loss", {0: 1, 1: 3}),
        *own_counter("samples", {0: 64}),
        *own_gauge("much", {0: int("9" * 400)}, series="my_app_much"),
    ]
    told = figures(pages(agent_page(0, seconds={"training": int("9" * 400), "waiting": 1}, steps=(2, 1), own=own)))
    found = text(shown(told))
    assert [line.split() for line in found if line.startswith("my_app")] == [
        ["my_app", "loss", "1", "1", "to", "3", "over", "the", "ranks"],
        ["my_app", "much", "inf"],
        ["my_app", "samples", "64"],
    ]
    assert told.seconds == {"waiting": 1.0}


@pytest.mark.parametrize("rank", ["9" * 5000, "9" * 10, "-1", "x", ""])
def test_what_is_no_rank_is_left_out(rank: str) -> None:
    page = agent_page(0, steps=(2.0, 100), own=own_gauge("train.loss", {0: 0.5}))
    told = figures(pages(page.replace('rank="0"', f'rank="{rank}"'), agent_page(1)))
    assert [each.rank for each in told.ranks] == [1]
    assert told.own == ()


def test_gpus_are_shown_where_there_are_some() -> None:
    own = [
        line
        for name, value in (("memory_used_bytes", 8e9), ("memory_total_bytes", 8e10), ("utilization_ratio", 0.93))
        for line in (
            f"# TYPE torchelastic_gpu_{name} gauge",
            f'torchelastic_gpu_{name}{{elasticjob="digits",gpu="0"}} {value}',
        )
    ]
    assert text(shown(figures(pages(agent_page(own=own)))))[3:] == [
        "GPU   POD              MEMORY                 BUSY",
        "0     digits-0-aaaaa   7.45 GiB of 74.5 GiB   93.0 %",
    ]


SPLIT = {"asOf": "2023-11-14T22:13:40Z", "seconds": {"training": 10.0, "suspended": 5.0}, "lostSeconds": 1.0}
"""Where the time went in the first 20 seconds, as a status says it."""


def test_of_a_job_that_rests_its_status_tells() -> None:
    rests = {"state": "Suspended", "conditions": [{"type": "Suspended", "status": "True"}]}
    reading = shown(Figures(), status={**rests, "timeSplit": SPLIT, "freeRestarts": 7})
    assert text(reading) == [
        "digits  Suspended  1m40s",
        "epoch 4   world size 2   pods ready 2/3   restarts 1 charged, 7 free",
        "",
        "goodput 9.5 %   lost 1s",
        "training 10s (10.5 %)   suspended 1m25s (89.5 %)",
    ]
    assert len(text(shown(Figures()))) == 2


def test_of_a_job_that_has_finished_its_status_tells() -> None:
    ended = {"state": "Succeeded", "completionTime": "2023-11-14T22:13:40Z", "timeSplit": SPLIT}
    assert text(shown(Figures(), status=ended))[2:] == [
        "",
        "goodput 60.0 %   lost 1s",
        "training 10s (66.7 %)   suspended 5s (33.3 %)",
    ]


STOPS = {"type": "Suspended", "status": "False", "reason": "Stopping"}


@pytest.mark.parametrize("state", ["Pending", "Waiting", "Running", "Suspended"])
def test_what_was_true_before_a_job_was_resumed_is_not_shown_as_present(state: str) -> None:
    reading = shown(Figures(), status={"state": state, "timeSplit": SPLIT, "conditions": [STOPS]})
    assert text(reading) == [
        f"digits  {state}  1m40s",
        "epoch 4   world size 2   pods ready 2/3   restarts 1 charged, 0 free",
    ]
    assert table([reading])[1].split()[-5:-1] == ["-", "-", "1", "-"]


def test_what_matters_least_gives_way_to_a_small_terminal() -> None:
    own = [line for number in range(50) for line in own_gauge(f"name{number}", {0: 1.0}, series=f"my_app_name{number}")]
    told = figures(
        pages(
            agent_page(*range(100), seconds=LEADS, steps=(2.0, 100), own=own),
            agent_page(100, steps=(9.0, 100)),
        )
    )
    for height in (10, 24, 50, 200):
        small = text(shown(told), height=height)
        assert len(small) <= height
        assert small[0] == "digits  Running  1m40s"
    assert any(line.startswith("100 ") and line.endswith("straggles") for line in text(shown(told), height=24))
    assert "and 93 more ranks" in text(shown(told), height=24)


@pytest.mark.parametrize("height", range(2, 30))
def test_in_the_smallest_terminal_ranks_and_names_are_shown_or_counted(height: int) -> None:
    own = [line for number in range(3) for line in own_gauge(f"name{number}", {0: 1.0}, series=f"my_app_name{number}")]
    told = figures(
        pages(agent_page(0, seconds=LEADS, steps=(2.0, 100), own=own, recoveries=(0.3, 1)), agent_page(1, own=()))
    )
    found = text(shown(told, notes=["a", "b"]), width=60, height=height, bar=True)
    assert len(found) <= height
    ranks = [line for line in found if line.startswith(("0 ", "1 "))]
    names = [line for line in found if line.startswith("my_app ")]
    left = ", ".join([*(["2 more ranks"] if not ranks else []), *(["3 more names"] if not names else [])])
    assert (f"and {left}" in found) == bool(left)
    assert len(ranks) in (0, 2)
    if height == 9:  # a terminal of 10 lines: one is kept for what goes wrong
        assert found[3:4] == ["goodput 90.0 %"]
        assert left == "2 more ranks, 3 more names"


def test_the_bar_is_as_wide_as_the_terminal_and_split_as_the_time() -> None:
    told = figures(pages(agent_page(0, seconds=LEADS)))
    legend = [plain(line) for line in lines(shown(told), width=60, bar=True) if "■" in plain(line)]
    assert [line.count("■") for line in legend] == [2, 2]
    assert max(map(len, legend)) <= 60
    [bar] = [line for line in lines(shown(told), width=80, bar=True) if line and line[0].text.startswith("█")]
    assert [(len(piece.text), piece.style) for piece in bar] == [
        (72, "green"),
        (4, "blue"),
        (1, "magenta"),
        (3, "yellow"),
    ]


def test_all_jobs_have_a_line_each() -> None:
    told = figures(pages(agent_page(0, seconds=LEADS, lost=4.0, steps=(2.0, 100))))
    header, first, second = table([shown(told), shown(Figures())])
    assert header.split() == ["NAME", "STATE", "READY", "EPOCH", "WORLD", "GOODPUT", "LOST", "RESTARTS", "STEP", "AGE"]
    assert first.split() == ["digits", "Running", "2/3", "3", "2", "86.0", "%", "4s", "2+3", "20ms", "1m40s"]
    assert second.split() == ["digits", "Running", "2/3", "4", "2", "-", "-", "1", "-", "1m40s"]
    assert table([shown(told)], namespaces=True)[1].split()[0] == "default"


async def test_jobs_that_do_not_fit_are_counted() -> None:
    class Jobs:
        async def job(self, name: str) -> tuple[Shown, list[Page], list[str]]:
            raise AssertionError(name)

        async def jobs(self) -> list[tuple[Shown, list[Page]]]:
            return [(Shown.of(snapshot()), [])] * 5

    screen = top._JobsScreen(Jobs(), namespaces=False)
    await screen.read()
    for height, jobs in ((6, 5), (5, 3), (2, 0)):
        found = [plain(line) for line in screen.lines(80, height)]
        assert [line.split()[0] for line in found] == ["NAME", *["digits"] * jobs, *(["and"] if jobs < 5 else [])]
        assert jobs == 5 or found[-1] == f"and {5 - jobs} more jobs"


def test_the_age_in_the_list_is_that_of_elasticjob_get() -> None:
    ended = shown(Figures(), status={"state": "Succeeded", "completionTime": "2023-11-14T22:13:40Z"})
    [listed] = get.table([ended.shown], NOW)[1:]
    assert (table([ended])[1].split()[-1], listed.split()[-1]) == ("1m40s", "1m40s")
    assert table([shown(Figures(), run={}, status={"startTime": None}, manifest={})])[1].split()[-1] == "-"


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0s"),
        (0.000421, "0.421ms"),
        (0.0123, "12.3ms"),
        (0.9999, "1s"),
        (1.52, "1.52s"),
        (59.9, "59.9s"),
        (125, "2m05s"),
        (-0.5, "-500ms"),
        (float("inf"), "inf"),
    ],
)
def test_short_times_are_written_with_three_digits(seconds: float, written: str) -> None:
    assert quantities.span(seconds) == written


def test_amounts_are_written_with_their_unit() -> None:
    assert [quantities.size(amount) for amount in (0, 999, 1000, 6.4e8, 1.5e12)] == [
        *("0 B", "999 B", "0.977 KiB", "610 MiB", "1.36 TiB")
    ]
    assert [quantities.share(part) for part in (0, 0.0001, 0.5, 0.9999, 1)] == [
        *("0 %", "below 0.1 %", "50.0 %", "100 %", "100 %")
    ]
    assert [quantities.number(value) for value in (3.0, 0.33333, float("nan"), 2e12)] == ["3", "0.3333", "nan", "2e+12"]


# -- whom it asks


def pods(*names: str) -> list[ShownPod]:
    return [
        ShownPod(name=name, index=number, ready=True, phase="Running", created=number, metrics_url="http://x:1/metrics")
        for number, name in enumerate(names)
    ]


async def test_a_pod_in_trouble_is_told_of_and_stops_nothing() -> None:
    async def fetch(pod: ShownPod) -> str:
        if pod.name == "b":
            raise ClusterError("its agent does not answer in time")
        return "<html>" if pod.name == "c" else agent_page(0)

    found, notes = await ask(pods("a", "b", "c", "d"), fetch)
    assert [page.pod for page in found] == ["a", "d"]
    assert notes[0] == "b: its agent does not answer in time"
    assert notes[1].startswith("c: what it shows cannot be read as metrics (")


async def test_pods_that_hang_hold_nobody_up() -> None:
    hung = {f"hung-{number}" for number in range(100)}

    async def fetch(pod: ShownPod) -> str:
        if pod.name in hung:
            await asyncio.Event().wait()
        return agent_page(0)

    async with asyncio.timeout(30):
        one, one_note = await ask(pods("a", "hung-7", "b"), fetch, patience=0.2)
        many, many_note = await ask(pods(*sorted(hung), "z"), fetch, patience=2.0)
    assert ([page.pod for page in one], one_note) == (["a", "b"], ["hung-7: its agent does not answer in time"])
    assert ([page.pod for page in many], many_note) == (["z"], ["100 pods do not answer in time, hung-0 for one"])


async def test_a_leader_that_hangs_holds_up_neither_its_job_nor_the_others() -> None:
    async def fetch(pod: ShownPod) -> str:
        if pod.name == "hung":
            await asyncio.Event().wait()
        return agent_page(0, seconds=LEADS)

    async with asyncio.timeout(30):
        found = await ask_leaders([(pods("hung"), fetch), (pods("hung", "a"), fetch), (pods("b"), fetch)], patience=0.5)
    assert [[page.pod for page in pages] for pages in found] == [[], ["a"], ["b"]]


async def test_what_may_not_be_asked_is_said_once() -> None:
    async def fetch(pod: ShownPod) -> str:
        raise NotAllowed(f"what the agents tell may not be read ({pod.name} is forbidden)")

    assert await ask(pods("a", "b", "c"), fetch) == ([], ["what the agents tell may not be read (a is forbidden)"])


async def test_pods_that_have_ended_or_show_nothing_are_not_asked() -> None:
    async def fetch(pod: ShownPod) -> str:
        raise AssertionError(pod.name)

    silent = [
        Shown.of(snapshot(pods=[pod(0, "a", **changes)])).pods[0] for changes in ({"metricsUrl": None}, {"ended": 1.0})
    ]
    assert await ask(silent, fetch) == ([], [])


async def test_for_the_list_of_jobs_the_leader_is_asked_first_and_few_others() -> None:
    asked: list[str] = []

    async def fetch(pod: ShownPod) -> str:
        asked.append(pod.name)
        return agent_page(0, seconds=LEADS if pod.name == "b" else None)

    [found] = await ask_leaders([(pods("a", "b", "c"), fetch)])
    assert [page.pod for page in found] == ["a", "b"]
    asked.clear()
    [found] = await ask_leaders([(pods("v", "w", "x", "y", "z"), fetch)])
    assert len(found) == len(asked) == 3
