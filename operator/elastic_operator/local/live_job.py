"""The job's object while it runs here: what an API server would hold, and which changes it accepts.

A change is checked as a whole, against the CRD and against what may change while a job runs. A refused change changes
nothing.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from elastic_operator.api.spec import ElasticJobSpec
from elastic_operator.api.status import JobStatus
from elastic_operator.api.validation import problem_of
from elastic_operator.api.validation_error import in_words
from elastic_operator.api.wire import rfc3339
from elastic_operator.controller.model import Job
from elastic_operator.errors import BadInput
from elastic_operator.local.unsupported_fields import supported
from elastic_operator.manifest import crd
from elastic_operator.manifest.loader import check_change

if TYPE_CHECKING:
    from elastic_operator.api.spec import Json
    from elastic_operator.manifest.loader import ElasticJobManifest, Manifest


class LiveJob:
    """One job that runs here.

    Attributes:
        name: the job's name.
        key: namespace/name, its key in the reconciler.
        manifest: the live object, without its status.
        status: the status as the plan last wrote it.
    """

    def __init__(self, given: ElasticJobManifest, *, uid: str, created: float) -> None:
        """Create a job from a manifest, at ``created`` seconds since the Unix epoch."""
        self.name = given.name
        self.key = f"{given.namespace}/{given.name}"
        self.status = JobStatus()
        self._namespace = given.namespace
        self._in_file = _named_in(given.source)
        self._not_in_file: dict[str, object] = {}
        self._spec = supported(given.spec)
        self._uid = uid
        self._created = created
        self._generation = 1
        self._deleting = False
        self.manifest = self._as_object(given.job)

    def job(self) -> Job:
        """Return the job as the plan sees it."""
        return Job(
            name=self.name,
            namespace=self._namespace,
            uid=self._uid,
            generation=self._generation,
            spec=self._spec,
            status=self.status,
            created=self._created,
            deleting=self._deleting,
            problem=problem_of(self._spec),
        )

    def patch(self, fields: Json) -> bool:
        """Set fields of the spec, as ``kubectl patch`` would; return whether that changes it.

        Raises:
            BadInput: the result is not valid, or the job is over.
        """
        self._check_alive()
        changed = {**self.manifest, "spec": {**self.manifest["spec"], **fields}}
        if problems := crd.validate(changed, old=self.manifest):
            raise BadInput(in_words(list(map(str, problems))))
        return self._patch(fields)

    def apply(self, file: Manifest) -> bool:
        """Take the spec of a file, as ``kubectl apply`` would; return whether that changes it.

        A field that was patched keeps its value as long as the file does not name it.

        Raises:
            BadInput: the result is not valid, or a running job cannot follow the change.
        """
        self._check_alive()
        changed = check_change(file, live=self.manifest, kept=self._not_in_file)
        self._in_file = _named_in(file)
        self._not_in_file = {name: value for name, value in self._not_in_file.items() if name not in self._in_file}
        return self._take(changed.job)

    def set_replicas(self, replicas: int) -> None:
        """Write the number of pods that the plan chose because the user gave none."""
        self._patch({"replicas": replicas})

    def delete(self) -> None:
        """Begin its deletion."""
        self._deleting = True

    def _check_alive(self) -> None:
        if self._deleting or self.status.state.finished:
            how = "being deleted" if self._deleting else f"over ({self.status.state})"
            raise BadInput(f"the job {self.name} is {how} and cannot be changed any more")

    def _patch(self, fields: Json) -> bool:
        self._not_in_file |= {name: value for name, value in fields.items() if name not in self._in_file}
        return self._take({**self.manifest, "spec": {**self.manifest["spec"], **fields}})

    def _take(self, changed: Json) -> bool:
        if changed["spec"] != self.manifest["spec"]:
            self._generation += 1
            self._spec = supported(ElasticJobSpec.of(changed["spec"]))
        before, self.manifest = self.manifest, self._as_object(changed)
        return before != self.manifest

    def _as_object(self, job: Json) -> dict[str, Any]:
        """Return the object with the metadata that an API server writes."""
        written: dict[str, Any] = copy.deepcopy(dict(job))
        written["metadata"] |= {
            "uid": self._uid,
            "generation": self._generation,
            "creationTimestamp": rfc3339(self._created),
        }
        return written


def _named_in(file: Manifest) -> set[str]:
    return {name for name, value in file.data["spec"].items() if value is not None}
