"""The job's object while it runs here: what an API server would hold, and which changes to it are allowed.

A change is checked as a whole before anything of it is done: against the CRD, as ``kubectl apply`` would, and against
what may change while a job runs. What is refused changes nothing.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from elastic_operator import crd
from elastic_operator.errors import BadInput
from elastic_operator.local.not_honoured import honoured
from elastic_operator.manifest import check_change
from elastic_operator.model import Job, JobStatus
from elastic_operator.problem import in_words
from elastic_operator.spec import ElasticJobSpec
from elastic_operator.status_json import rfc3339

if TYPE_CHECKING:
    from elastic_operator.manifest import ElasticJobManifest, Manifest
    from elastic_operator.spec import Json


class LiveJob:
    """One job that runs here.

    Attributes:
        name: the job's name.
        key: namespace/name, by which the reconciler knows it.
        manifest: the live object, without its status.
        status: what the plan last said of it.
    """

    def __init__(self, given: ElasticJobManifest, *, uid: str, created: float) -> None:
        """A job that was just made.

        Args:
            given: the manifest.
            uid: unique for all time.
            created: seconds since the Unix epoch.
        """
        self.name = given.name
        self.key = f"{given.namespace}/{given.name}"
        self.status = JobStatus()
        self._applied = given.source.data
        self._spec = honoured(given.spec)
        self._uid = uid
        self._created = created
        self._generation = 1
        self._deleting = False
        self.manifest = self._as_object(given.job)

    def job(self) -> Job:
        """The job as the plan sees it."""
        return Job(
            name=self.name,
            namespace=self.manifest["metadata"]["namespace"],
            uid=self._uid,
            generation=self._generation,
            spec=self._spec,
            status=self.status,
            created=self._created,
            deleting=self._deleting,
        )

    def scale(self, replicas: int) -> bool:
        """Ask for another number of pods.

        Returns:
            Whether that is another number than before.

        Raises:
            BadInput: the number cannot be, or the job is over.
        """
        return self._set("replicas", replicas)

    def suspend(self, *, rest: bool) -> bool:
        """Have the job rest, or go on.

        Returns:
            Whether it did otherwise before.

        Raises:
            BadInput: the job is over.
        """
        return self._set("suspend", rest)

    def apply(self, file: Manifest) -> bool:
        """Do what ``kubectl apply`` of this file would do.

        Returns:
            Whether the object is another now.

        Raises:
            BadInput: the result would not be valid, or is more of a change than a running job can follow.
        """
        self._check_alive()
        changed = check_change(file, last_applied=self._applied, live=self.manifest)
        self._applied = file.data
        return self._take(changed.job)

    def set_replicas(self, replicas: int) -> None:
        """Write the wanted number that the plan chose where the user wrote none."""
        self._take({**self.manifest, "spec": {**self.manifest["spec"], "replicas": replicas}})

    def delete(self) -> None:
        """Begin its deletion."""
        self._deleting = True

    def _set(self, field: str, value: object) -> bool:
        """Set a field of the spec, as ``kubectl patch`` would."""
        self._check_alive()
        changed = {**self.manifest, "spec": {**self.manifest["spec"], field: value}}
        if problems := crd.validate(changed, old=self.manifest):
            raise BadInput(in_words(list(map(str, problems))))
        return self._take(changed)

    def _check_alive(self) -> None:
        if self._deleting or self.status.state.finished:
            how = "being deleted" if self._deleting else f"over ({self.status.state})"
            raise BadInput(f"the job {self.name} is {how} and does not change any more")

    def _take(self, changed: Json) -> bool:
        if changed["spec"] != self.manifest["spec"]:
            self._generation += 1
            self._spec = honoured(ElasticJobSpec.of(changed["spec"]))
        before, self.manifest = self.manifest, self._as_object(changed)
        return before != self.manifest

    def _as_object(self, job: Json) -> dict[str, Any]:
        """The object with what an API server writes into its metadata."""
        written: dict[str, Any] = copy.deepcopy(dict(job))
        written["metadata"] |= {
            "uid": self._uid,
            "generation": self._generation,
            "creationTimestamp": rfc3339(self._created),
        }
        return written
