"""``elasticjob report``: the content of the page; tests/integration opens the page in a browser."""

from __future__ import annotations

import itertools
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from elastic_operator.api.status import JobState, Report
from elastic_operator.reports.page import facts, page
from tests.support.cluster_objects import START
from tests.support.reports import TRACEBACK, failed, killed, long, report
from torchelastic.protocol.records import HistoryRecord, PastRound, RoundReason, RunState, TimeBreakdown


class Reader(HTMLParser):
    """Reads the elements and the visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == [], "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if self.open and self.open[-1] == "style" else f"{data}\n"

    def of_class(self, kind: str) -> list[dict[str, str | None]]:
        return [about for _, about in self.elements if kind in (about.get("class") or "").split()]


def read(shown: Report) -> Reader:
    return Reader(page(shown))


def percent(text: str | None) -> float:
    assert text is not None
    assert text.endswith("%")
    return float(text[:-1])


# -- the text


def test_the_page_of_a_job_that_succeeded_shows_times_pods_and_lost_work() -> None:
    text = read(report()).text
    for words in ("digits: succeeded after 1m40s", "Succeeded", "78.0 %", "1m40s", "2 to 3", "4 pods joined"):
        assert words in text
    assert "2023-11-14 22:13:20 UTC" in text
    assert "Root cause" not in text
    assert "6s" in text.split("Work lost")[1][:10]


def test_the_page_of_a_job_that_failed_has_the_root_cause_and_the_failures() -> None:
    found = read(failed())
    assert "Root cause: \nrank 0 on digits-0-aaaaa failed" in found.text
    wrong = found.text.split("What went wrong")[1].split("Rounds")[0]
    for words in (
        "rank 1, digits-1-bbbbb",
        "SIGKILL",
        "digits-2-ccccc is gone",
        "rank 0, digits-0-aaaaa",
        "exit code 1",
    ):
        assert words in wrong
    assert TRACEBACK in found.text
    assert wrong.count("The job failed because of this.") == 1


def test_the_page_of_an_interrupted_run_says_how_it_ended() -> None:
    unfinished = report(state=JobState.RUNNING, completed_at=None, outcome=None)
    assert "digits: running after 1m40s" in read(unfinished).text
    interrupted = Reader(page(unfinished, "interrupted")).text
    assert "digits: interrupted after 1m40s" in interrupted
    assert "Interrupted" in interrupted
    assert "digits: succeeded after" in page(report(), "succeeded")


def test_unknown_facts_are_left_out() -> None:
    bare = Report(namespace="", name="digits", uid="", created=START, state=JobState.SUSPENDED)
    found = read(bare)
    for words in ("Timeline", "Where the time went", "What went wrong", "UID"):
        assert words not in found.text
    assert "Suspended" in found.text
    unknown = report(
        time_breakdown=None,
        history=HistoryRecord(created=START, rounds=(PastRound(1, START + 5, 2, 2, RoundReason.NODE_JOINED),)),
    )
    rounds = read(unknown).text.split("Rounds")[-1]
    assert "lost" not in rounds
    assert "node joined" in rounds


def test_the_facts_have_the_durations_failures_and_goodput_of_the_report() -> None:
    found = facts(failed())
    assert [(span.end or 0) - span.round.began for span in found.spans] == [20, 20, 20, 5, 30]
    assert [span.lost for span in found.spans] == [0.0, 4.0, 1.5, 0.5, None]
    assert [(each.round, each.rank, each.what, each.final) for each in found.failures] == [
        (2, 1, "SIGKILL", False),
        (3, None, "pod lost", False),
        (5, 0, "exit code 1", True),
    ]
    assert found.goodput == pytest.approx(0.78)


def test_a_recovery_ends_with_the_first_step_and_the_agents_share_with_the_start_of_the_workers() -> None:
    joined = RoundReason.NODE_JOINED
    rounds = (
        PastRound(1, START, 1, 1, joined, ended=START + 10, started_at=START + 1, first_step_at=START + 3),
        PastRound(2, START + 11, 1, 1, joined, ended=START + 13, started_at=START + 12),
        PastRound(3, START + 14, 1, 1, joined, ended=START + 50, started_at=START + 14.5, first_step_at=START + 16),
        PastRound(4, START + 80, 1, 1, joined, started_at=START + 81, first_step_at=START + 83),
    )
    shown = report(history=HistoryRecord(created=START, rounds=rounds), suspensions=(START + 60,))
    assert [(span.recovery, span.restart) for span in facts(shown).spans] == [
        (None, None),
        (None, 2.0),
        (6.0, 4.5),
        (None, None),
    ], "the first start and a resumption are no recoveries, and a failure before the first step prolongs one"
    assert "agents' share" in read(shown).text
    assert "agents' share" not in read(report()).text


def test_the_rounds_tell_how_many_workers_stayed_and_that_ranks_began_at_different_steps() -> None:
    rounds = (
        PastRound(1, START, 2, 2, RoundReason.NODE_JOINED, ended=START + 10),
        PastRound(2, START + 10, 2, 2, RoundReason.WORKER_FAILED, staying=1, first_steps=(0, 120)),
    )
    both = read(report(history=HistoryRecord(created=START, rounds=rounds))).text
    first = read(report(history=HistoryRecord(created=START, rounds=rounds[:1]))).text
    for said in ("stayed", "the ranks began at different steps, from 0 to 120"):
        assert said in both
        assert said not in first


def test_a_job_that_reported_no_checkpoints_has_no_goodput() -> None:
    split = report().time_breakdown
    assert split is not None
    unknown = report(time_breakdown=msgspec.structs.replace(split, lost=None))
    assert facts(unknown).goodput is None
    assert read(unknown).text.count("no checkpoints reported") == 2


def test_a_round_ends_with_a_suspension_or_with_its_workers() -> None:
    def lasted(shown: Report) -> list[float]:
        return [(span.end or 0) - span.round.began for span in facts(shown).spans]

    assert lasted(report(suspensions=(START + 1, START + 30, START + 71))) == [20, 5, 20, 5, 1], (
        "the last round has its duration, too"
    )
    whole = report()
    first, second, *others = whole.history.rounds
    second = msgspec.structs.replace(second, ended=START + 41)
    history = msgspec.structs.replace(whole.history, rounds=(first, second, *others))
    assert lasted(replace(whole, history=history))[:3] == [20, 16, 20]


# -- the charts


def test_a_long_history_reports_the_omitted_rounds() -> None:
    found = read(long())
    assert "Of 2000 rounds, 1800 in the middle are not kept." in found.text
    assert "rounds 101 to 1900 and the end of round 100 were not kept" in found.text
    bars = [about for about in found.of_class("round") if "%" in (about.get("x") or "")]
    assert len(bars) == 199
    ends = sorted((percent(bar["x"]), percent(bar["x"]) + percent(bar["width"])) for bar in bars)
    assert all(end <= begin + 1e-3 for (_, end), (begin, _) in itertools.pairwise(ends))
    assert 0 <= ends[0][0] < ends[-1][1] <= 100.001
    assert len(page(long())) < 300_000


def test_text_of_the_program_is_escaped() -> None:
    evil = '</title><script>alert("1")</script><b onclick=x>\x00\ud800 &amp;'
    failure = killed(1, 0, message=evil, node=f"{evil}.1")
    rounds = (PastRound(2, START + 1, 1, 1, RoundReason.WORKER_FAILED, evil, failure, 1.0),)
    whole = report(
        name=evil, namespace=evil, uid=evil, message=evil, state=JobState.FAILED, history=HistoryRecord(rounds=rounds)
    )
    text = page(whole)
    plain = page(report(state=JobState.FAILED, history=HistoryRecord(rounds=rounds[:1]), message="x"))
    assert [tag for tag, _ in Reader(text).elements if tag in ("script", "b")] == ["b"]
    assert "<script" not in text
    assert "\x00" not in text
    text.encode()
    assert Reader(plain).elements[:3] == Reader(text).elements[:3]


@pytest.mark.parametrize(
    "changes",
    [
        {"completed_at": START - 5},
        {"created": 0.0, "completed_at": None, "time_breakdown": None},
        {"created": START + 1000, "completed_at": None},
        {"time_breakdown": TimeBreakdown()},
        {"time_breakdown": TimeBreakdown(until=START, seconds={RunState.TRAINING: 0.0}, lost=7.0)},
        {"time_breakdown": TimeBreakdown(until=START, seconds={RunState.TRAINING: 1.0}, lost=1e9)},
        {
            "history": HistoryRecord(
                rounds=(PastRound(7, START), PastRound(7, START - 9, lost=5.0), PastRound(3, START + 9))
            )
        },
        {"history": HistoryRecord(rounds=(PastRound(1, 1e11, 1_000_000, 1_000_000), PastRound(2, 0.0)))},
        {"completed_at": 1e11},
    ],
)
def test_impossible_times_keep_all_shapes_within_the_chart(changes: dict[str, Any]) -> None:
    for shown in (report(**changes), failed(**changes)):
        found = read(shown)
        for about in (*found.of_class("round"), *found.of_class("state"), *found.of_class("lost")):
            if "%" in (about.get("x") or ""):
                assert 0 <= percent(about["x"]) <= 100
                assert 0 <= percent(about["width"]) <= 100.001
