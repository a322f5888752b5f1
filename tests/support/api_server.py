"""An API server over one connection with plain JSON, for tests with thousands of requests."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from elastic_operator.api.spec import GROUP, PLURAL, VERSION

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Answer:
    """The server's answer: the object, or a Status with the error."""

    status: int
    body: dict[str, Any]

    @property
    def accepted(self) -> bool:
        """Whether the request succeeded.

        Raises:
            AssertionError: it failed for another reason than an invalid object.
        """
        assert self.status in {200, 201, 400, 422}, self.words
        return self.status < 300

    @property
    def words(self) -> str:
        """The message, in one line."""
        return f"{self.status} {self.body.get('message', 'accepted')}"


class ElasticJobs:
    """The jobs of the namespace that a kubeconfig with a token names; a context manager."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        [cluster], [user], [context] = config["clusters"], config["users"], config["contexts"]
        authority = base64.b64decode(cluster["cluster"]["certificate-authority-data"]).decode()
        url = urllib.parse.urlsplit(cluster["cluster"]["server"])
        self._connection = http.client.HTTPSConnection(
            url.netloc, context=ssl.create_default_context(cadata=authority), timeout=30
        )
        self._headers = {"Authorization": f"Bearer {user['user']['token']}", "Content-Type": "application/json"}
        self._path = f"{url.path}/apis/{GROUP}/{VERSION}/namespaces/{context['context']['namespace']}/{PLURAL}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def create(self, manifest: dict[str, Any], *, dry_run: bool = False) -> Answer:
        """Create a job, or ask for the result with ``dryRun``."""
        return self._ask("POST", "", manifest, dry_run=dry_run)

    def replace(self, name: str, manifest: dict[str, Any]) -> Answer:
        """Replace a job; the object must have its resourceVersion."""
        return self._ask("PUT", f"/{name}", manifest)

    def replace_status(self, manifest: dict[str, Any], *, dry_run: bool = False) -> Answer:
        """Replace the status of a job, or ask for the result with ``dryRun``."""
        return self._ask("PUT", f"/{manifest['metadata']['name']}/status", manifest, dry_run=dry_run)

    def delete(self, name: str) -> None:
        """Delete a job."""
        answer = self._ask("DELETE", f"/{name}", None)
        assert answer.accepted, answer.words

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, *, dry_run: bool = False) -> Answer:
        query = "" if body is None else "?fieldValidation=Strict" + "&dryRun=All" * dry_run
        try:
            self._connection.request(method, self._path + path + query, json.dumps(body), self._headers)
            response = self._connection.getresponse()
        except (OSError, http.client.HTTPException):
            self._connection.close()  # the next request opens it again
            raise
        return Answer(response.status, json.loads(response.read()))
