"""How often the operator asked the API server for what: counted by the API server itself, in its audit log."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

WRITES: Final = frozenset({"create", "update", "patch", "delete", "deletecollection"})

_FLUSHED: Final = 0.5
"""Seconds after which what was answered stands in the log."""


class Audit:
    """The requests of one user.

    Args:
        folder: for the policy and the log.
        user: whose requests are noted.
    """

    def __init__(self, folder: Path, user: str) -> None:
        self._policy = folder / "audit-policy.json"
        self._log = folder / "audit.log"
        self._user = user

    def flags(self) -> tuple[str, ...]:
        """With which the API server is started."""
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
        """A place in the log: what has been asked so far stands before it."""
        await asyncio.sleep(_FLUSHED)
        return self._log.stat().st_size if self._log.exists() else 0

    async def since(self, mark: int, namespace: str | None = None) -> Counter[str]:
        """What was asked since then, each as "verb resource", such as "create pods" or "update elasticjobs/status".

        Args:
            mark: see :meth:`mark`.
            namespace: only in this one; None: everywhere.
        """
        await asyncio.sleep(_FLUSHED)
        if not self._log.exists():
            return Counter()
        with self._log.open("rb") as log:
            log.seek(mark)
            entries: list[dict[str, Any]] = [json.loads(line) for line in log if line.endswith(b"\n")]
        return Counter(
            _words(entry)
            for entry in entries
            if namespace is None or entry.get("objectRef", {}).get("namespace") == namespace
        )


def writes(counted: Counter[str], *, lease: bool = False) -> Counter[str]:
    """Those that change something.

    Args:
        counted: by "verb resource".
        lease: whether the leader's lease counts.
    """
    return Counter(
        {
            words: times
            for words, times in counted.items()
            if words.partition(" ")[0] in WRITES and (lease or not words.endswith(" leases"))
        }
    )


def _words(entry: dict[str, Any]) -> str:
    what = entry.get("objectRef", {})
    kind = what.get("resource", entry.get("requestURI", "").partition("?")[0])
    part = what.get("subresource")
    return f"{entry['verb']} {kind}/{part}" if part else f"{entry['verb']} {kind}"
