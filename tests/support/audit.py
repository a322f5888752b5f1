"""The permitted and denied requests of service accounts, from an API server's audit log."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_POLICY: Final[Mapping[str, Any]] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}


class AuditLog:
    """The audit log of an API server that is started with :attr:`flags`.

    Args:
        folder: the folder of the log.
    """

    def __init__(self, folder: Path) -> None:
        self._policy = folder / "audit-policy.json"
        self._log = folder / "audit.log"

    @property
    def flags(self) -> Sequence[str]:
        """Of the API server."""
        self._policy.write_text(json.dumps(_POLICY))
        return (f"--audit-policy-file={self._policy}", f"--audit-log-path={self._log}")

    def used(self, namespace: str, account: str) -> set[tuple[str, str, str]]:
        """The permitted requests of a service account: group, resource, verb."""
        return {what for what, allowed in self._asked(namespace, account) if allowed}

    def refused(self, namespace: str, account: str) -> set[tuple[str, str, str]]:
        """The denied requests of a service account."""
        return {what for what, allowed in self._asked(namespace, account) if not allowed}

    def _asked(self, namespace: str, account: str) -> Iterator[tuple[tuple[str, str, str], bool]]:
        user = f"system:serviceaccount:{namespace}:{account}"
        for line in self._log.read_text().splitlines():
            entry = json.loads(line)
            about = entry.get("objectRef")
            if about is None or entry["user"]["username"] != user or "impersonatedUser" in entry:
                continue
            resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
            allowed = entry["annotations"]["authorization.k8s.io/decision"] == "allow"
            yield (about.get("apiGroup", ""), resource, entry["verb"]), allowed
