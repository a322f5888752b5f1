"""Fetch the metrics pages of a job's agents.

A reading takes a few seconds at most: agents that have not answered by then are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from elastic_operator.errors import ClusterError
from elastic_operator.views.job_metrics import MetricsPage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from elastic_operator.views.job_view import PodView

    Fetch = Callable[[PodView], Awaitable[str]]
    """Fetches a pod's page; raises ClusterError."""

MAX_PAGE: Final = 8 << 20
"""Bytes; 16 workers with a hundred histograms and a thousand other metrics each make 6 MiB."""
TIMEOUT: Final = 4.0
"""Seconds for all agents together; one agent may take half of it."""
_CONCURRENCY: Final = 64
_MAX_LEADER_CANDIDATES: Final = 3


class ScrapeForbidden(ClusterError):  # noqa: N818 - as PermissionError
    """The user may not read the metrics of any pod."""


async def scrape(
    pods: Sequence[PodView],
    fetch: Fetch,
    *,
    timeout: float = TIMEOUT,  # noqa: ASYNC109 - for all requests together
) -> tuple[list[MetricsPage], list[str]]:
    """Fetch the pages of all pods of a job; return them and a sentence for each problem."""
    serving = sorted(_serving(pods), key=lambda pod: (pod.index, pod.name))
    pages: dict[str, MetricsPage] = {}
    problems: dict[str, ClusterError] = {}
    gate = asyncio.Semaphore(_CONCURRENCY)

    async def read(pod: PodView) -> None:
        try:
            async with gate, asyncio.timeout(timeout / 2):
                text = await fetch(pod)
            pages[pod.name] = MetricsPage(pod.name, text)
        except ClusterError as error:
            problems[pod.name] = error
        except TimeoutError:
            pass

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await asyncio.gather(*map(read, serving))
    names = [pod.name for pod in serving]
    notes = [str(error) for error in problems.values() if isinstance(error, ScrapeForbidden)][:1]
    told = [name for name in names if name in problems and not isinstance(problems[name], ScrapeForbidden)]
    notes += [f"{name}: {problems[name]}" for name in told]
    late = [name for name in names if name not in pages and name not in problems]
    if len(late) == 1:
        notes.append(f"{late[0]}: its agent does not answer in time")
    elif late:
        notes.append(f"{len(late)} pods do not answer in time, {late[0]} for one")
    return [pages[name] for name in names if name in pages], notes


async def scrape_leaders(
    jobs: Sequence[tuple[Sequence[PodView], Fetch]],
    *,
    timeout: float = TIMEOUT,  # noqa: ASYNC109
) -> list[list[MetricsPage]]:
    """Fetch for each job the page of its leader, usually the oldest pod, or of a few others if it is not found soon."""
    found: list[list[MetricsPage]] = [[] for _ in jobs]
    gate = asyncio.Semaphore(_CONCURRENCY)

    async def read(pods: Sequence[PodView], fetch: Fetch, pages: list[MetricsPage]) -> None:
        for pod in sorted(_serving(pods), key=lambda pod: pod.created)[:_MAX_LEADER_CANDIDATES]:
            with contextlib.suppress(ClusterError, TimeoutError):
                async with gate, asyncio.timeout(timeout / _MAX_LEADER_CANDIDATES):
                    text = await fetch(pod)
                pages.append(MetricsPage(pod.name, text))
                if MetricsPage.is_leader(text):
                    return

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await asyncio.gather(*(read(*job, pages) for job, pages in zip(jobs, found, strict=True)))
    return found


def _serving(pods: Sequence[PodView]) -> list[PodView]:
    return [pod for pod in pods if pod.metrics_url and not pod.over]
