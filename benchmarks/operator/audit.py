"""The requests of the operator, from the audit log of the API server."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

WRITES: Final = frozenset({"create", "update", "patch", "delete", "deletecollection"})

_FLUSHED: Final = 0.5
"""Seconds after which an answered request is assumed to be in the log."""


class Audit:
    """The requests of one user.

    Args:
        folder: the folder for the policy and the log.
        user: the name of the user.
    """

    def __init__(self, folder: Path, user: str) -> None:
        self._policy = folder / "audit-policy.json"
        self._log = folder / "audit.log"
        self._user = user

    def flags(self) -> tuple[str, ...]:
        """Return the flags for the API server."""
        rules = [
            {"level": "Metadata", "users": [self._user], "omitStages": ["RequestReceived", "ResponseStarted"]},
            {"level": "None"},
        ]
        self._policy.write_text(json.dumps({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules}))
        return (
            f"--audit-policy-file={self._policy}",
            f"--audit-log-path={self._log}",
            "--audit-log-mode=batch",
            "--audit-log-maxsize=0",
        )

    async def mark(self) -> int:
        """Return the end of the log; all requests so far are before it."""
        await asyncio.sleep(_FLUSHED)
        return self._log.stat().st_size if self._log.exists() else 0

    async def since(self, mark: int, namespace: str | None = None) -> Counter[str]:
        """Count the requests after a mark, as "create pods" or "update elasticjobs/status".

        Args:
            mark: the result of :meth:`mark`.
            namespace: the namespace whose requests are counted; None for all requests.
        """
        await asyncio.sleep(_FLUSHED)
        if not self._log.exists():
            return Counter()
        with self._log.open("rb") as log:
            log.seek(mark)
            entries: list[dict[str, Any]] = [json.loads(line) for line in log if line.endswith(b"\n")]
        return Counter(
            _request(entry)
            for entry in entries
            if namespace is None or entry.get("objectRef", {}).get("namespace") == namespace
        )


def writes(counted: Counter[str]) -> Counter[str]:
    """Return the requests that change something, without those for the leader's lease."""
    return Counter(
        {
            request: times
            for request, times in counted.items()
            if request.partition(" ")[0] in WRITES and not request.endswith(" leases")
        }
    )


def _request(entry: dict[str, Any]) -> str:
    ref = entry.get("objectRef", {})
    kind = ref.get("resource", entry.get("requestURI", "").partition("?")[0])
    part = ref.get("subresource")
    return f"{entry['verb']} {kind}/{part}" if part else f"{entry['verb']} {kind}"
