"""A group of tasks whose error is the error of one of them, for whoever turns errors into sentences."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator


@contextlib.asynccontextmanager
async def task_group() -> AsyncGenerator[asyncio.TaskGroup, None]:
    """As :class:`asyncio.TaskGroup`, but the first error of the block or of a task is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise next(_leaves(errors)) from None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error
