"""Dashboards and alerts on a real job: a real Prometheus scrapes the job while the job grows and loses a worker."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from elastic_operator.client.local import LocalJobs
from scripts.monitoring.alerts import JOBS
from scripts.monitoring.dashboard import Needs
from scripts.monitoring.files import RULES
from scripts.monitoring.fleet import FLEET_DASHBOARD
from scripts.monitoring.job import JOB_DASHBOARD, MARKS
from tests.support.local_runs import LocalRun, gone, manifest, processes_of
from tests.support.monitored import OWN, PROGRAM, complaints, filled_in, names_in, queries, unit_of
from tests.support.prometheus import Prometheus, promtool
from tests.support.scraping import scraped_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from scripts.monitoring.dashboard import Dashboard, Panel, Query
    from tests.support.local_runs import Snapshot
    from tests.support.prometheus import Answer

pytestmark = [pytest.mark.integration, pytest.mark.prometheus, pytest.mark.asyncio(loop_scope="module")]

KILLS, RESTARTS = 1, 5
NOT_HERE = {Needs.GPU, Needs.OPERATOR}


class MonitoredRun:
    """A monitored run, and its state from sources other than Prometheus.

    Attributes:
        prometheus: the server that scrapes the job.
        snapshot: the job at the end of the scenario, when it still trains.
        began: the start of the scraping in seconds since the Unix epoch.
        ended: the end of the scenario in seconds since the Unix epoch.
        pages: the metrics pages of the agents at the end of the scenario.
    """

    prometheus: Prometheus
    snapshot: Snapshot
    began: float
    ended: float
    pages: list[str]

    @property
    def values(self) -> dict[str, str]:
        """The values of the dashboard variables."""
        metadata = self.snapshot["manifest"]["metadata"]
        return {"job_namespace": metadata.get("namespace", ""), "elasticjob": metadata["name"], **OWN}

    @property
    def age(self) -> float:
        """An upper bound on the seconds since the job was created."""
        return time.time() - self.began + 60

    async def answer(self, expr: str, **values: str) -> Answer:
        """Return the answer to a dashboard query at the end of the scenario."""
        return await self.prometheus.query(filled_in(expr, {**self.values, **values}), at=self.ended)

    async def one(self, expr: str) -> float:
        """Return the value of the only sample of an answer."""
        [sample] = await self.answer(expr)
        return sample.value


def ports(snapshot: Snapshot) -> list[str]:
    """Return the addresses at which the agents serve /metrics."""
    return [f"127.0.0.1:{urlsplit(pod['metricsUrl']).port}" for pod in snapshot["pods"] if pod["metricsUrl"]]


def labels(answer: Answer, name: str) -> dict[str, float]:
    """Return the values of an answer's samples, by the value of a label."""
    return {sample.labels[name]: sample.value for sample in answer}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def monitored(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MonitoredRun]:
    """A run of two pods that is scaled to three, loses a worker, and trains again with all three."""
    folder = tmp_path_factory.mktemp("monitored")
    home = folder / "home"
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "train.py"), str(folder)]
    monitored_run = MonitoredRun()
    async with Prometheus.running(folder / "prometheus", rules=[RULES]) as prometheus:
        monitored_run.prometheus = prometheus
        async with LocalRun(home, manifest(folder, command=command, maxRestarts=RESTARTS)) as run:
            monitored_run.began = time.time()
            snapshot = await run.wait_until_training(2)
            prometheus.scrape(ports(snapshot))
            # Prometheus sees a change only if it has scraped the earlier value.
            await prometheus.until("count_over_time(torchelastic_world_size[1m]) > 5", lambda seen: len(seen) == 2)
            await asyncio.to_thread(LocalJobs(home=home).scale, "job", 3)
            snapshot = await run.wait_until_training(3, after=snapshot["status"]["round"])
            prometheus.scrape(ports(snapshot))
            await prometheus.until("sum(torchelastic_world_size)", lambda answer: answer and answer[0].value == 9)
            # The lost time is the time since the last checkpoint.
            await prometheus.until("torchelastic_checkpoint_write_latency_seconds_count > 1", lambda a: len(a) == 3)
            os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
            monitored_run.snapshot = await run.wait_until_training(3, after=snapshot["status"]["round"])
            round = monitored_run.snapshot["status"]["round"]
            # Wait until each rank has written a checkpoint in this round.
            unchanged = f"min(min_over_time(torchelastic_round[5s])) == {round}"
            written = "sum by (rank) (increase(torchelastic_checkpoint_write_latency_seconds_count[5s])) > 0"
            await prometheus.until(f"{written} and on () ({unchanged})", lambda answer: len(answer) == 3)
            monitored_run.ended = time.time()
            monitored_run.pages = [
                await scraped_text(int(where.rpartition(":")[2])) for where in ports(monitored_run.snapshot)
            ]
            await prometheus.until("time()", lambda answer: answer[0].value > monitored_run.ended + 1)
            yield monitored_run
            (folder / "finish").touch()
            assert await run.exit_code() == 0, run.output
    assert await gone(processes_of(home), within=60)


def answerable_queries(dashboard: Dashboard) -> list[Any]:
    """Return the dashboard queries that a job on one machine answers."""
    return [
        pytest.param(panel, query, id=" ".join(filter(None, (panel.title, query.legend))))
        for panel, query in queries(dashboard)
        if query.needs not in NOT_HERE
    ]


@pytest.mark.parametrize(("panel", "query"), [*answerable_queries(JOB_DASHBOARD), *answerable_queries(FLEET_DASHBOARD)])
async def test_every_panel_has_data_of_the_right_unit_and_size(
    monitored: MonitoredRun, panel: Panel, query: Query
) -> None:
    all_namespaces = {} if (panel, query) in queries(JOB_DASHBOARD) else {"job_namespace": ".*"}
    answer = await monitored.answer(query.expr, **all_namespaces)
    assert not list(complaints(answer, unit_of(panel, query), age=monitored.age)), query.expr


def the_query(title: str, legend: str = "", dashboard: Dashboard = JOB_DASHBOARD) -> str:
    """Return the query of a panel."""
    found = [
        query.expr
        for panel, query in queries(dashboard)
        if panel.title == title and (not legend or query.legend == legend)
    ]
    assert len(found) == 1 or len(set(found)) == 1, (title, legend)
    return found[0]


async def test_member_round_and_restart_metrics_match_the_job(monitored: MonitoredRun) -> None:
    status = monitored.snapshot["status"]
    for title, legend, value in (
        ("Workers", "", 3),
        ("World size", "workers", 3),
        ("World size", "nodes", 3),
        ("World size", "desired nodes", 3),
        ("World size", "minimum nodes", 1),
        ("Round", "round", status["round"]),
        ("Restarts", "charged", KILLS),
        ("Remaining restarts", "", RESTARTS - KILLS),
        ("Nodes joined and departed", "joined", 3),
    ):
        assert await monitored.one(the_query(title, legend)) == value, (title, legend)
    assert await monitored.one(the_query("Restarts", "uncharged")) == status["round"] - 1 - KILLS
    gone = labels(await monitored.answer(the_query("Nodes joined and departed", "{{cause}}")), "cause")
    assert gone == {"left": 0, "died": 0, "not_needed": 0}


async def test_the_states_add_up_to_the_wall_time(monitored: MonitoredRun) -> None:
    created = await monitored.one("min(timestamp(torchelastic_job_nodes) - on () sum(torchelastic_job_seconds_total))")
    made = datetime.fromisoformat(monitored.snapshot["manifest"]["metadata"]["creationTimestamp"]).timestamp()
    assert made - 0.5 <= created <= made + 1.1  # the timestamp has whole seconds, and a scrape takes a moment
    age = await monitored.one(the_query("Age"))
    assert age == pytest.approx(monitored.ended - created, rel=0.01, abs=2)
    split = labels(await monitored.answer(the_query("Time by state")), "state")
    assert sum(split.values()) == pytest.approx(age)
    assert split["training"] > 3
    assert split["suspended"] == 0
    assert {"waiting", "rendezvous", "starting", "restoring", "stopping"} <= split.keys()
    fleet = labels(
        await monitored.answer(the_query("Time by state", dashboard=FLEET_DASHBOARD), job_namespace=".*"), "state"
    )
    assert fleet == pytest.approx(split, abs=0.1)  # the two queries do not read the same scrapes
    shares = labels(await monitored.answer(the_query("State over time")), "state")
    assert sum(shares.values()) == pytest.approx(1)
    lost = await monitored.one(the_query("Lost work", "lost"))
    # Work since the last checkpoint counts as lost; the job writes a checkpoint each second.
    assert 0 < lost < 60
    goodput = await monitored.one(the_query("Goodput", "goodput"))
    assert goodput == pytest.approx((split["training"] - lost) / age, rel=0.01)
    assert await monitored.one(
        the_query("Goodput", dashboard=FLEET_DASHBOARD).replace("$job_namespace", ".*")
    ) == pytest.approx(goodput, rel=0.01)


async def test_events_are_marked(monitored: MonitoredRun) -> None:
    marked = {}
    for mark in MARKS:
        expr = filled_in(mark.query.expr, monitored.values)
        marked[mark.name] = await monitored.prometheus.moments(
            expr, since=monitored.began, until=monitored.ended, step=1
        )
    assert len(marked["Worker failed"]) == KILLS
    assert len(marked["Desired size changed"]) == 1
    [size], [failure] = marked["Desired size changed"], marked["Worker failed"]
    assert size < failure
    # One round follows the resize and one the failure; the third node may have joined in a round of its own.
    assert len(marked["New round"]) >= 2


async def test_recoveries_are_counted_by_cause(monitored: MonitoredRun) -> None:
    counted = labels(await monitored.answer(the_query("Recoveries")), "cause")
    assert counted["worker_failed"] == 3 * KILLS
    assert sum(counted.values()) >= 3 * KILLS + 2
    slowest = labels(await monitored.answer(the_query("Time to recover", "{{cause}}, 95 %")), "cause")
    assert slowest.keys() == counted.keys()


async def test_steps_and_checkpoints_take_their_real_time(monitored: MonitoredRun) -> None:
    by_rank = labels(await monitored.answer(the_query("Step time by rank")), "rank")
    assert by_rank.keys() == {"0", "1", "2"}
    assert all(0.1 <= seconds < 5 for seconds in by_rank.values())
    assert 0.2 <= await monitored.one(the_query("Steps per second")) <= 10.5
    writing = labels(await monitored.answer(the_query("Writing checkpoints")), "rank")
    assert writing.keys() == {"0", "1", "2"}
    assert all(0.02 <= seconds < 5 for seconds in writing.values())
    samples = labels(await monitored.answer(the_query("$counter, per second")), "rank")
    assert all(64 * 0.2 <= rate <= 64 * 10.5 for rate in samples.values())
    batches = labels(await monitored.answer(the_query("$histogram")), "rank")
    assert batches == pytest.approx(dict.fromkeys("012", 0.005))


async def test_program_metrics_can_be_selected_by_group(monitored: MonitoredRun) -> None:
    for group in ("", "my_app"):
        for variable in JOB_DASHBOARD.variables:
            if variable.name in ("gauge", "counter", "histogram"):
                selector = variable.values.removeprefix("label_values(").removesuffix(", __name__)")
                names = await monitored.prometheus.series(filled_in(selector, monitored.values | {"group": group}))
                # Grafana uses JavaScript's regular expressions; the ones in this dashboard mean the same in Python.
                found = {match[1] for name in names if (match := re.match(variable.regex.strip("/"), name))}
                assert found == {OWN[variable.name]}
    own = {variable.name: variable for variable in JOB_DASHBOARD.variables}["gauge"]
    selector = own.values.removeprefix("label_values(").removesuffix(", __name__)")
    assert not await monitored.prometheus.series(filled_in(selector, monitored.values | {"group": "other"}))


async def test_no_alert_covers_a_healthy_job(monitored: MonitoredRun) -> None:
    assert await monitored.prometheus.query('ALERTS{alertstate="firing"}') == []
    asked_for = names_in(alert.expr for alert in JOBS)
    agents_own = {name for name in asked_for if name.startswith("torchelastic_")}
    assert len(agents_own) >= 4
    for name in agents_own:
        assert await monitored.prometheus.query(name), name


async def test_promtool_accepts_the_metrics_page_of_an_agent(monitored: MonitoredRun) -> None:
    assert len(monitored.pages) == 3
    for page in monitored.pages:
        run = promtool("check", "metrics", stdin=page)
        assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
