"""An API server asked for plain JSON over one connection: for thousands of questions in a test."""

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
    """What the server answered: the object, or a Status that says what is wrong."""

    status: int
    body: dict[str, Any]

    @property
    def accepted(self) -> bool:
        """Whether it did as it was told.

        Raises:
            AssertionError: it did not for another reason than that the object is wrong.
        """
        assert self.status in {200, 201, 400, 422}, self.words
        return self.status < 300

    @property
    def words(self) -> str:
        """What it says, in a line."""
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

    def try_to_create(self, manifest: dict[str, Any]) -> Answer:
        """What would come of a creation; nothing is created."""
        return self._ask("POST", "?fieldValidation=Strict&dryRun=All", manifest)

    def create(self, manifest: dict[str, Any]) -> Answer:
        """Create a job."""
        return self._ask("POST", "?fieldValidation=Strict", manifest)

    def replace(self, name: str, manifest: dict[str, Any]) -> Answer:
        """Put this into a job's place; its resourceVersion must be in it."""
        return self._ask("PUT", f"/{name}?fieldValidation=Strict", manifest)

    def replace_status(self, manifest: dict[str, Any]) -> Answer:
        """Put the status of this into the place of its job's."""
        return self._ask("PUT", f"/{manifest['metadata']['name']}/status?fieldValidation=Strict", manifest)

    def try_to_replace_status(self, name: str, manifest: dict[str, Any]) -> Answer:
        """What would come of putting the status of this into a job's place; nothing is changed."""
        return self._ask("PUT", f"/{name}/status?fieldValidation=Strict&dryRun=All", manifest)

    def delete(self, name: str) -> None:
        """Delete a job."""
        answer = self._ask("DELETE", f"/{name}", None)
        assert answer.accepted, answer.words

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Answer:
        self._connection.request(method, self._path + path, json.dumps(body), self._headers)
        response = self._connection.getresponse()
        return Answer(response.status, json.loads(response.read()))
