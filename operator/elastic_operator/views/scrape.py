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
    gate, deadline = asyncio.Semaphore(_CONCURRENCY), asyncio.get_running_loop().time() + timeout

    async def read(pod: PodView) -> MetricsPage | ClusterError | TimeoutError:
        try:
            async with asyncio.timeout_at(deadline), gate, asyncio.timeout(timeout / 2):
                return MetricsPage(pod.name, await fetch(pod))
        except (ClusterError, TimeoutError) as error:
            return error

    found = dict(zip((pod.name for pod in serving), await asyncio.gather(*map(read, serving)), strict=True))
    notes = [str(error) for error in found.values() if isinstance(error, ScrapeForbidden)][:1]
    for name, error in found.items():
        if isinstance(error, ClusterError) and not isinstance(error, ScrapeForbidden):
            notes.append(f"{name}: {error}")
    late = [name for name, error in found.items() if isinstance(error, TimeoutError)]
    if len(late) == 1:
        notes.append(f"{late[0]}: its agent does not answer in time")
    elif late:
        notes.append(f"{len(late)} pods do not answer in time, {late[0]} for one")
    return [page for page in found.values() if isinstance(page, MetricsPage)], notes


async def scrape_leaders(
    jobs: Sequence[tuple[Sequence[PodView], Fetch]],
    *,
    timeout: float = TIMEOUT,  # noqa: ASYNC109
) -> list[list[MetricsPage]]:
    """Fetch for each job the page of its leader, usually the oldest pod, or of a few others if it is not found soon."""
    gate, deadline = asyncio.Semaphore(_CONCURRENCY), asyncio.get_running_loop().time() + timeout

    async def read(pods: Sequence[PodView], fetch: Fetch) -> list[MetricsPage]:
        pages: list[MetricsPage] = []
        for pod in sorted(_serving(pods), key=lambda pod: pod.created)[:_MAX_LEADER_CANDIDATES]:
            with contextlib.suppress(ClusterError, TimeoutError):
                async with asyncio.timeout_at(deadline), gate, asyncio.timeout(timeout / _MAX_LEADER_CANDIDATES):
                    text = await fetch(pod)
                pages.append(MetricsPage(pod.name, text))
                if MetricsPage.is_leader(text):
                    break
        return pages

    return await asyncio.gather(*(read(*job) for job in jobs))


def _serving(pods: Sequence[PodView]) -> list[PodView]:
    return [pod for pod in pods if pod.metrics_url and not pod.over]
