"""Asks the agents of a job for what they tell under /metrics, wherever they are.

A reading takes a few seconds at most, however many agents hang: those that have not answered by then are left out.
Their answers are read in a thread: whatever stands in them, the view goes on, and can be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.errors import ClusterError
from elastic_operator.showing.agent_page import Page, leads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from elastic_operator.showing.shown import ShownPod

    Fetch = Callable[[ShownPod], Awaitable[str]]
    """Gets a pod's page; raises ClusterError."""

LARGEST_PAGE: Final = 8 << 20
"""Bytes of one page; that of 16 workers with a hundred histograms and a thousand other names each has 6 MiB."""

PATIENCE: Final = 4.0
"""Seconds for one reading, of however many agents."""
_SHARE: Final = 0.5
"""The part of them that one agent may take: where so many hang as are asked at once, others still have their turn."""
READING: Final = 10.0
"""Seconds after which of all answers no further one is read; those of a hundred agents take two."""
_AT_ONCE: Final = 64
_MOST: Final = 256
"""So many pods are asked for each reading."""
_CANDIDATES: Final = 3
"""So many pods are asked where one of them, the leader, will do."""


class NotAllowed(ClusterError):  # noqa: N818 - it says what happened
    """The user may not ask the agents: what holds for one pod holds for all."""


async def ask(
    pods: Sequence[ShownPod], fetch: Fetch, *, patience: float = PATIENCE, reading: float = READING
) -> tuple[list[Page], list[str]]:
    """The pages of all pods that serve one.

    Args:
        pods: of the job.
        fetch: gets one page.
        patience: seconds for all of them together.
        reading: seconds after which no further page is begun with.

    Returns:
        The pages; and what kept others from being there, in sentences.
    """
    gate = asyncio.Semaphore(_AT_ONCE)
    answers: dict[str, str | ClusterError] = {}

    async def one(pod: ShownPod) -> None:
        async with gate:
            answer = await _answer(pod, fetch, patience * _SHARE)
        if answer is not None:
            answers[pod.name] = answer

    serving = _serving(pods)
    asked = serving[:_MOST]
    await _within(patience, [one(pod) for pod in asked])
    # What it takes to read the pages is nothing that agents are blamed for.
    answered = [(pod, answers[pod.name]) for pod in asked if pod.name in answers]
    refusals = [answer for _, answer in answered if isinstance(answer, NotAllowed)]
    told = await _read([each for each in answered if each[1] not in refusals[1:]], reading)
    notes = [answer for answer in told if isinstance(answer, str)]
    notes += _late([pod.name for pod in asked if pod.name not in answers])
    if len(serving) > _MOST:
        notes.append(f"only the first {_MOST} of {len(serving)} pods are asked")
    return [answer for answer in told if isinstance(answer, Page)], notes


async def ask_leaders(
    jobs: Sequence[tuple[Sequence[ShownPod], Fetch]], *, patience: float = PATIENCE, reading: float = READING
) -> list[list[Page]]:
    """Of each job the page of the agent that leads, or of others where it is not found soon.

    Args:
        jobs: the pods of each, of which the oldest leads, if it has not just come back; and what gets one's page.
        patience: seconds for all jobs together.
        reading: seconds after which no further page is begun with.
    """
    gate = asyncio.Semaphore(_AT_ONCE)
    found: list[list[tuple[ShownPod, str | ClusterError]]] = [[] for _ in jobs]

    async def one(pods: Sequence[ShownPod], fetch: Fetch, answers: list[tuple[ShownPod, str | ClusterError]]) -> None:
        for pod in sorted(_serving(pods), key=lambda pod: pod.created)[:_CANDIDATES]:
            async with gate:
                answer = await _answer(pod, fetch, patience / _CANDIDATES)
            if isinstance(answer, str):
                answers.append((pod, answer))
                if leads(answer):
                    break

    await _within(patience, [one(pods, fetch, answers) for (pods, fetch), answers in zip(jobs, found, strict=True)])
    told = iter(await _read([answer for answers in found for answer in answers], reading))
    return [[page for page in islice(told, len(answers)) if isinstance(page, Page)] for answers in found]


async def _within(patience: float, errands: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run errands at the same time, and give up those that take longer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience), asyncio.TaskGroup() as group:
            for errand in errands:
                group.create_task(errand)


def _late(names: Sequence[str]) -> list[str]:
    match names:
        case []:
            return []
        case [name]:
            return [f"{name}: its agent does not answer in time"]
        case _:
            return [f"{len(names)} pods do not answer in time, {names[0]} for one"]


def _serving(pods: Sequence[ShownPod]) -> list[ShownPod]:
    return sorted((pod for pod in pods if pod.metrics_url and not pod.over), key=lambda pod: (pod.index, pod.name))


async def _answer(pod: ShownPod, fetch: Fetch, patience: float) -> str | ClusterError | None:
    """What it shows, or why that cannot be had; None where it takes too long."""
    try:
        async with asyncio.timeout(patience):
            return await fetch(pod)
    except TimeoutError:
        return None
    except ClusterError as error:
        return error


async def _read(answers: Sequence[tuple[ShownPod, str | ClusterError]], patience: float) -> list[Page | str]:
    """Of each pod its page, or why there is none, in a sentence.

    The short ones are read first: where pods show so much that the time is over, others have not waited for them.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + patience
    found: dict[int, Page | str] = {}
    texts: list[tuple[int, ShownPod, str]] = []
    for at, (pod, answer) in enumerate(answers):
        if isinstance(answer, str):
            texts.append((at, pod, answer))
        else:
            found[at] = str(answer) if isinstance(answer, NotAllowed) else f"{pod.name}: {answer}"
    for at, pod, text in sorted(texts, key=lambda each: len(each[2])):
        if clock() > until:
            found[at] = f"{pod.name}: there was no time left to read its page of metrics"
            continue
        try:
            found[at] = await asyncio.to_thread(Page, pod.name, text)
        except ClusterError as error:
            found[at] = f"{pod.name}: {error}"
    return [found[at] for at in range(len(answers))]
