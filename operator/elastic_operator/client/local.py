"""Access to the jobs on this machine."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_operator.client import ScrapedJob
from elastic_operator.errors import BadInput, ClusterError, ElasticJobError, NotFound
from elastic_operator.local.client import LocalRuns
from elastic_operator.views.job_view import JobView
from elastic_operator.views.log_selector import LogSelector

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_operator.client import Tell
    from elastic_operator.local.log_files import LogFile
    from elastic_operator.views.job_view import PodView


class LocalJobs(LocalRuns):
    """Access to the jobs on this machine; ``tell`` gets sentences for the user."""

    place = "here"
    start_command = "elasticjob run FILE"

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell

    def close(self) -> None:
        """Do nothing: no connection stays open."""

    def snapshots(self, name: str | None, *, every_run: bool, pods: bool) -> list[dict[str, Any]]:  # noqa: ARG002
        """Return the snapshots of all jobs, or of one."""
        return self.list(name, every=every_run)

    def describe(self, name: str) -> dict[str, Any]:
        """Return the snapshot of a job."""
        return self.get(name)

    def scrape(self, name: str) -> ScrapedJob:
        """Read the metrics of all agents of a job."""
        import asyncio

        from elastic_operator.views.scrape import scrape

        job = JobView.of(self.get(name))
        return ScrapedJob(job, *asyncio.run(scrape(_live_pods(job), _fetch)))

    def scrape_leaders(self) -> list[ScrapedJob]:
        """Read for each job the metrics of its leader."""
        import asyncio

        from elastic_operator.views.scrape import scrape_leaders

        jobs = [JobView.of(each) for each in self.list()]
        pages = asyncio.run(scrape_leaders([(_live_pods(job), _fetch) for job in jobs]))
        return [ScrapedJob(*each) for each in zip(jobs, pages, strict=True)]

    def logs(self, name: str, selector: LogSelector, write: Callable[[bytes], object]) -> bool:
        """Write a job's logs."""
        from elastic_operator.local.log_files import LogReader, follow

        run = JobView.of(self.get(name)).run
        reader = LogReader(write, label=not selector.single_source, tail=selector.tail)
        if selector.follow and run.alive:
            ended = threading.Event()
            # A daemon, since its blocking read must not keep the command alive.
            threading.Thread(target=self._await_end, args=(run.id, ended), daemon=True).start()
            follow(Path(run.logs), selector, reader, ended=ended, tell=self._tell, only=selector.round)
        else:
            reader.read(select_files(Path(run.logs), selector))
            reader.finish()
        return True

    def delete(self, name: str, *, wait: bool = True) -> None:
        """End a job's run."""
        if not wait:
            raise BadInput("--no-wait is for jobs on a cluster; name one with -n or --context, or leave --no-wait out")
        super().delete(name)

    def _await_end(self, run_id: str, ended: threading.Event) -> None:
        try:
            with contextlib.suppress(ElasticJobError):  # it has ended already
                for _ in self.run(run_id).watch():
                    pass
        finally:
            ended.set()


def select_files(logs: Path, selector: LogSelector) -> list[LogFile]:
    """Return the log files of one round: the selected one, or the latest.

    Raises:
        NotFound: there are none; the message says what there is.
    """
    from elastic_operator.local.log_files import log_files

    everything = log_files(logs, LogSelector(agents=selector.agents))
    there = [file for file in everything if selector.pod in (None, file.pod)]
    if selector.pod is not None and not there:
        pods = sorted({file.pod for file in everything})
        raise NotFound(f"there is no log of pod {selector.pod}; there are logs of {', '.join(pods) or 'none'}")
    ranks: dict[int, set[int]] = {}
    for file in there:
        ranks.setdefault(file.round, set()).add(file.rank)
    if not ranks and not selector.agents:
        raise NotFound(f"no worker has started yet; what the agents say is in {logs}/*/agent.log (--agent)")
    round = max(ranks, default=0) if selector.round is None else selector.round
    if not selector.agents:
        selector.check(ranks, round)
    return [file for file in there if file.round == round and selector.rank in (None, file.rank)]


async def _fetch(pod: PodView) -> str:
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(trust_env=False) as session,  # agents are on loopback: no proxy
            session.get(pod.metrics_url or "") as response,
        ):
            if response.status != 200:
                raise ClusterError(f"its agent answers with HTTP status {response.status}")
            return (await response.read()).decode(errors="replace")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        number = error.errno if isinstance(error, OSError) else None
        why = os.strerror(number) if number else str(error) or type(error).__name__
        raise ClusterError(f"its agent does not answer ({why})") from None


def _live_pods(job: JobView) -> Sequence[PodView]:
    return job.pods if job.run.alive else ()
