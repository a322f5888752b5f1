"""The loop of a program that trains in one world of ranks after the other."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_Result = TypeVar("_Result")


class WorldChanged(BaseException):
    """The world has changed; :func:`call_in_worlds` calls its function again.

    It is no Exception, so that an ``except Exception`` of the program does not catch it.
    """


class Worlds(Protocol):
    """Where a process finds the worlds of its training, one after the other."""

    def world(self) -> AbstractContextManager[None]:
        """Return a context manager for a block in the current world, with its process group.

        Raises:
            RuntimeError: the world cannot be formed, for example because a rank was lost meanwhile.
        """

    def next(self, error: RuntimeError | None) -> bool:
        """Wait for the next world, after the error of the current one, or because it has changed.

        Returns:
            Whether there is another world.
        """

    def end(self) -> None:
        """Leave the last world together with the other ranks.

        Raises:
            WorldChanged: ranks of the next world need the state of this process.
            RuntimeError: the same, after a rank was lost.
        """


def call_in_worlds(worlds: Worlds, function: Callable[[], _Result]) -> _Result:
    """Call a function in each world until it returns, and return its result.

    If it raises WorldChanged or RuntimeError, as a collective does when a rank is lost, it is called in the next world.

    Raises:
        RuntimeError: there is no other world.
        BaseException: any other exception of the function.
    """
    while True:
        error = None
        try:
            with worlds.world():
                result = function()
                worlds.end()
                return result
        except WorldChanged as changed:
            traceback.clear_frames(changed.__traceback__)  # there is time now to free what the function has created
        except RuntimeError as raised:
            error = raised
        # Outside of the blocks above, so that the traceback of an exception such as KeyboardInterrupt has only its own.
        if not worlds.next(error):
            raise error or RuntimeError("The agent has not announced the next world.")
