"""Fetch the metrics pages of a job's agents.

A reading takes a few seconds at most: agents that have not answered by then are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.errors import ClusterError
from elastic_operator.views.job_metrics import MetricsPage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from elastic_operator.views.job_view import PodView

    Fetch = Callable[[PodView], Awaitable[str]]
    """Fetches a pod's page; raises ClusterError."""

MAX_PAGE: Final = 8 << 20
"""Bytes; 16 workers with a hundred histograms and a thousand other metrics each make 6 MiB."""
FETCH_TIMEOUT: Final = 4.0
"""Seconds for all agents together; one agent may take half of it."""
PARSE_TIMEOUT: Final = 10.0
"""Seconds after which no further page is parsed; those of a hundred agents take two."""
_CONCURRENCY: Final = 64
_MAX_PODS: Final = 256
_MAX_LEADER_CANDIDATES: Final = 3


class ScrapeForbidden(ClusterError):  # noqa: N818 - as PermissionError
    """The user may not read the metrics of any pod."""


async def scrape(
    pods: Sequence[PodView], fetch: Fetch, *, fetch_timeout: float = FETCH_TIMEOUT, parse_timeout: float = PARSE_TIMEOUT
) -> tuple[list[MetricsPage], list[str]]:
    """Fetch the pages of all pods of a job; return them and a sentence for each problem."""
    gate = asyncio.Semaphore(_CONCURRENCY)
    answers: dict[str, str | ClusterError] = {}

    async def one(pod: PodView) -> None:
        async with gate:
            answer = await _answer(pod, fetch, fetch_timeout / 2)
        if answer is not None:
            answers[pod.name] = answer

    serving = _serving(pods)
    asked = serving[:_MAX_PODS]
    await _within(fetch_timeout, [one(pod) for pod in asked])
    answered = [(pod, answers[pod.name]) for pod in asked if pod.name in answers]
    refusals = [answer for _, answer in answered if isinstance(answer, ScrapeForbidden)]
    results = await _parse([each for each in answered if each[1] not in refusals[1:]], parse_timeout)
    notes = [each for each in results if isinstance(each, str)]
    late = [pod.name for pod in asked if pod.name not in answers]
    if len(late) == 1:
        notes.append(f"{late[0]}: its agent does not answer in time")
    elif late:
        notes.append(f"{len(late)} pods do not answer in time, {late[0]} for one")
    if len(serving) > _MAX_PODS:
        notes.append(f"only the first {_MAX_PODS} of {len(serving)} pods are asked")
    return [each for each in results if isinstance(each, MetricsPage)], notes


async def scrape_leaders(
    jobs: Sequence[tuple[Sequence[PodView], Fetch]],
    *,
    fetch_timeout: float = FETCH_TIMEOUT,
    parse_timeout: float = PARSE_TIMEOUT,
) -> list[list[MetricsPage]]:
    """Fetch for each job the page of its leader, usually the oldest pod, or of a few others if it is not found soon."""
    gate = asyncio.Semaphore(_CONCURRENCY)
    found: list[list[tuple[PodView, str | ClusterError]]] = [[] for _ in jobs]

    async def one(pods: Sequence[PodView], fetch: Fetch, answers: list[tuple[PodView, str | ClusterError]]) -> None:
        for pod in sorted(_serving(pods), key=lambda pod: pod.created)[:_MAX_LEADER_CANDIDATES]:
            async with gate:
                answer = await _answer(pod, fetch, fetch_timeout / _MAX_LEADER_CANDIDATES)
            if isinstance(answer, str):
                answers.append((pod, answer))
                if MetricsPage.is_leader(answer):
                    break

    await _within(fetch_timeout, [one(*job, answers) for job, answers in zip(jobs, found, strict=True)])
    results = iter(await _parse([answer for answers in found for answer in answers], parse_timeout))
    return [[each for each in islice(results, len(answers)) if isinstance(each, MetricsPage)] for answers in found]


async def _within(timeout: float, tasks: Sequence[Coroutine[Any, Any, None]]) -> None:  # noqa: ASYNC109
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(task)


def _serving(pods: Sequence[PodView]) -> list[PodView]:
    return sorted((pod for pod in pods if pod.metrics_url and not pod.over), key=lambda pod: (pod.index, pod.name))


async def _answer(pod: PodView, fetch: Fetch, timeout: float) -> str | ClusterError | None:  # noqa: ASYNC109
    try:
        async with asyncio.timeout(timeout):
            return await fetch(pod)
    except TimeoutError:
        return None
    except ClusterError as error:
        return error


async def _parse(answers: Sequence[tuple[PodView, str | ClusterError]], timeout: float) -> list[MetricsPage | str]:  # noqa: ASYNC109
    """Return each pod's page, or a sentence why there is none; short pages are parsed first."""
    clock = asyncio.get_running_loop().time
    until = clock() + timeout
    results: dict[int, MetricsPage | str] = {}
    for at, (pod, answer) in sorted(enumerate(answers), key=lambda each: len(str(each[1][1]))):
        if isinstance(answer, ScrapeForbidden):
            results[at] = str(answer)
        elif isinstance(answer, ClusterError):
            results[at] = f"{pod.name}: {answer}"
        elif clock() > until:
            results[at] = f"{pod.name}: there was no time left to read its page of metrics"
        else:
            try:
                results[at] = await asyncio.to_thread(MetricsPage, pod.name, answer)
            except ClusterError as error:
                results[at] = f"{pod.name}: {error}"
    return [results[at] for at in range(len(answers))]
