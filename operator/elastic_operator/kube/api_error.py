"""What the API server says when it does not do what it is asked, and what is said when it does not answer."""

from __future__ import annotations

import asyncio
import json
from typing import Final

from elastic_operator.errors import ClusterError

_POLICIES: Final = ('admission webhook "', "ValidatingAdmissionPolicy '")
"""How the API server's sentence names somebody else's rule, whose "no" comes with any status."""


class NoAnswer(ClusterError):  # noqa: N818 - it says what happened
    """The API server takes too long, or one of those that it asks does."""


class ApiError(ClusterError):
    """The API server refused.

    Attributes:
        status: the HTTP status.
        reason: in one word, such as NotFound, AlreadyExists, Conflict, Invalid.
        words: the server's own sentence.
    """

    def __init__(self, status: int, reason: str, words: str) -> None:
        super().__init__(f"the API server refused ({status} {reason}): {words}")
        self.status = status
        self.reason = reason
        self.words = words

    @property
    def not_found(self) -> bool:
        """Whether there is no such object."""
        return self.status == 404

    @property
    def conflict(self) -> bool:
        """Whether the object is there already, or has changed since it was read."""
        return self.status == 409

    @property
    def passes(self) -> bool:
        """Whether that is the server's own trouble, or that of one whom it asks, which most often passes."""
        return self.status >= 500 or self.status == 429

    @property
    def of_a_policy(self) -> bool:
        """Whether a rule of this cluster says no, which may say otherwise tomorrow."""
        return any(policy in self.words for policy in _POLICIES)

    @property
    def rejects_object(self) -> bool:
        """Whether the object itself can never be taken, however often it is tried."""
        return self.status in (400, 413, 415, 422) and not self.of_a_policy


def refusal(status: int, data: bytes) -> ApiError:
    """The error that an answer with this HTTP status and body stands for."""
    try:
        told = json.loads(data)
        return ApiError(status, str(told.get("reason") or ""), str(told.get("message") or ""))
    except (ValueError, AttributeError):
        return ApiError(status, "", data[:500].decode(errors="replace").strip())


def unreachable(error: Exception) -> ClusterError:
    """The error for a request that got no answer."""
    if isinstance(error, asyncio.TimeoutError):
        return NoAnswer("the API server does not answer in time")
    return ClusterError(f"the API server cannot be reached: {str(error) or type(error).__name__}")
