"""Executes a plan: writes the report and the status of the job, then changes the objects that the job owns."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from elastic_operator.api import constants
from elastic_operator.api.constants import Reason, report_name
from elastic_operator.api.json_values import get_dict, get_str
from elastic_operator.api.status import Report, encode_report
from elastic_operator.controller import messages
from elastic_operator.controller.model import EtcdState, Job, JobEvent, NewPod, Plan, PodPhase, with_applied_spec
from elastic_operator.errors import ClusterError
from elastic_operator.kubernetes import client
from elastic_operator.kubernetes.object_cache import ManagedEtcd, ObjectCache, managed_etcd
from elastic_operator.kubernetes.pod_status import MAX_PORT
from elastic_operator.kubernetes.writer import Blocked, Rejected, Writer, raise_worst
from elastic_operator.resources import owned_objects as owned
from elastic_operator.resources.network_policy import network_policy
from elastic_operator.resources.worker_pod import worker_pod
from torchelastic.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from elastic_operator.api.json_values import Json
    from elastic_operator.kubernetes.etcd_certificates import EtcdCertificates
    from elastic_operator.kubernetes.job_record import JobRecord
    from elastic_operator.kubernetes.job_store import JobStores


_Result = TypeVar("_Result")

logger: Final = logging.getLogger(__name__)

_MAX_BATCH: Final = 64
_MAX_SECONDS: Final = 10.0
"""Maximum number of seconds for which pods are created before the job is observed again."""


@dataclass(slots=True, kw_only=True)
class Executor:
    """Executes plans.

    Attributes:
        status_written: called with the observed job and the plan after the status is written.
    """

    cache: ObjectCache
    writer: Writer
    stores: JobStores
    certificates: EtcdCertificates
    settings: owned.PodSettings
    status_written: Callable[[Job, Plan], None] = lambda _job, _plan: None

    async def execute(self, job: Job, plan: Plan, record: JobRecord) -> bool:
        """Execute the plan in its order; return whether pods are left to create.

        Raises:
            ClusterError: a part of the plan failed.
        """
        body = record.body
        report_error = None if plan.report is None else await self._write_report(job, plan.report, record)
        if plan.replicas is not None:
            body = await self.writer.write_replicas(body, plan.replicas)
            job = replace(job, generation=body["metadata"]["generation"])
            record.creates.reset_for(job.generation)
        if plan.status is not None:
            try:
                await self.writer.write_status(body, plan.status)
            except ClusterError as error:
                if not isinstance(error, client.ApiError) or error.transient:
                    self._record_events(body, plan)  # if the status was written anyway, the next plan has no events
                raise
            self.status_written(job, plan)
        self._record_events(body, plan)
        if plan.unmanaged:
            return False
        try:
            return await self._apply_objects(with_applied_spec(job, plan), plan, record, report_error)
        except Rejected as error:
            logger.warning("%s: its pods are rejected: %s", record.key, error)
            record.creates.reject(str(error))
        except Blocked as error:
            if str(error) != record.creates.blocked:
                logger.warning("%s: pods cannot be created for now: %s", record.key, error)
            record.creates.block(str(error))
        return False

    async def _write_report(self, job: Job, report: Report, record: JobRecord) -> str | None:
        """Write the report of a run, unless it has not changed; return why the write must be repeated, or None."""
        digest = hashlib.blake2b(encode_report(report), digest_size=16).digest()
        if record.report == digest:
            return None
        try:
            await self.writer.write_report(job, report)
        except (Rejected, Blocked) as error:
            why = f"the run's report cannot be written to the ConfigMap {report_name(job.name)}: {error}"
            logger.warning("%s: %s", record.key, why)
            self.writer.event(record.body, JobEvent(Reason.REPORT_NOT_KEPT, why, warning=True))
        except ClusterError as error:
            return str(error)
        record.report = digest
        return None

    def _record_events(self, body: Json, plan: Plan) -> None:
        """Record the plan's events for the observed version of the job; an event that is recorded twice exists once."""
        for event in plan.events:
            self.writer.event(body, event)

    async def _apply_objects(self, job: Job, plan: Plan, record: JobRecord, report_error: str | None) -> bool:
        """Change the job's objects according to the plan; an error of one object does not block the others.

        Return whether pods are left to create. While there is a ``report_error``, the store is kept.
        """
        errors: list[ClusterError] = []

        async def attempt(work: Callable[..., Awaitable[_Result]], *args: Any, otherwise: _Result) -> _Result:  # noqa: ANN401 - those of work
            try:
                return await work(*args)
            except ClusterError as error:
                errors.append(error)
            except StoreError as error:
                errors.append(ClusterError(f"the desired size could not be written to the store: {error.message}"))
            return otherwise

        creates, left = record.creates, False
        waits = creates.wait > 0
        endpoint, has_policy = await asyncio.gather(
            attempt(self._ensure_etcd, job, plan, record, report_error, otherwise=None),
            attempt(self._ensure_network_policy, job, plan, record, otherwise=False),
        )
        has_group = await attempt(self._ensure_pod_group, job, plan, record, otherwise=False)
        incomplete = bool(errors)
        await attempt(self._ensure_pdb, job, plan, record, otherwise=None)
        if plan.size is not None:
            await attempt(self.stores.write_size, job.uid, plan.size, otherwise=None)
        delete = partial(attempt, self.writer.delete, client.PODS, job.namespace, otherwise=None)
        await asyncio.gather(*(delete(pod.name, pod.uid) for pod in plan.remove))
        if endpoint is not None and has_policy and has_group and plan.create:
            if not waits:
                left = await attempt(self._create_pods, job, plan.create, endpoint, record, otherwise=False)
        elif not incomplete and not waits and creates.rejected is None:
            creates.succeed()
        await attempt(self._annotate_ports, job, otherwise=None)
        raise_worst(errors)
        if plan.delete_job:
            await self.writer.delete(client.ELASTIC_JOBS, job.namespace, job.name, job.uid)
        return left

    async def _ensure_etcd(self, job: Job, plan: Plan, record: JobRecord, report_error: str | None) -> str | None:
        """Create or delete the job's own etcd; return the endpoint for pods, or None if no pods can be created."""
        external = job.spec.etcd.endpoint
        if not plan.etcd:
            if report_error is not None:
                raise ClusterError(f"the run's report could not be written yet, so its store is kept: {report_error}")
            if external is None or all(pod.phase.ended for pod in self.cache.pods(job.namespace, job.uid)):
                self.stores.unfollow(job.uid)
            for kind in (client.DEPLOYMENTS, client.SERVICES):
                await self._delete_owned(kind, job)
            return None
        # Missing objects of a job that is being deleted may have been deleted with it, so they are not created again.
        if job.deleting:
            return None
        rejected = record.creates.rejected is not None
        if external is not None:
            return None if rejected else external
        etcd = managed_etcd(self.cache, job)
        if rejected and etcd.state is not EtcdState.ABSENT and job.spec.etcd.has_certificates:
            await self._ensure_certificates(job, etcd, record)  # for the pods that run
        if rejected or (etcd.state is EtcdState.ABSENT and record.creates.wait > 0):
            return None
        if etcd.service is None:
            await self._create_service(job)
            etcd = managed_etcd(self.cache, job)
        if etcd.endpoint is None:
            raise ClusterError(f"the Service {owned.etcd_name(job.name)} has no address yet")
        certificate = await self._ensure_certificates(job, etcd, record) if job.spec.etcd.has_certificates else ""
        if etcd.deployment is None:
            deployment = owned.etcd_deployment(job, self.settings, certificate)
            await self.writer.create(client.DEPLOYMENTS, job, deployment)
        return etcd.endpoint

    async def _ensure_certificates(self, job: Job, etcd: ManagedEtcd, record: JobRecord) -> str:
        """Write the certificates of the job's etcd if they are due; return the annotation of its Deployment."""
        address = get_str(etcd.service, "spec", "clusterIP")
        note = get_str(etcd.deployment, "metadata", "annotations", constants.ANNOTATION_CERTIFICATE)
        lost = f'secret "{owned.etcd_name(job.name)}" not found'
        left = self.certificates.renewal(note, address)
        others = {uid: why for uid, why in record.startup.items() if lost not in why}
        is_lost = len(others) < len(record.startup)
        record.startup = others  # a lost Secret is written once, until the events are read again
        if is_lost or not left:
            note = self.certificates.note(address)
            files = self.certificates.issue(job.uid, owned.etcd_hosts(job, address))
            try:
                await self.writer.put(client.SECRETS, job, owned.etcd_secret(job, files))
            except Rejected as error:
                raise Blocked(
                    f"the Secret {owned.etcd_name(job.name)} with certificates for the job's etcd cannot be written; "
                    f"if it belongs to another program, delete it, or give the job another name ({error})"
                ) from None
            if etcd.deployment is not None:
                about = etcd.deployment["metadata"]
                notes = {constants.ANNOTATION_CERTIFICATE: note}
                await self.writer.annotate(client.DEPLOYMENTS, job.namespace, about["name"], about["uid"], notes)
            left = self.certificates.renewal(note, address)
        record.requeue_after(left)
        return note

    async def _create_service(self, job: Job) -> None:
        """Create the service of the job's etcd, at the address that live pods use."""
        pods = self.cache.pods(job.namespace, job.uid)
        addresses = (pod.etcd_address for pod in pods if not pod.phase.ended and not pod.terminating)
        known = next(filter(None, addresses), None)
        try:
            await self.writer.create(client.SERVICES, job, owned.etcd_service(job, cluster_ip=known))
        except Rejected as error:
            if known is None or known not in str(error):
                raise
            raise Blocked(
                f"the address {known}, which the pods of this job use for their etcd, now belongs to another Service: "
                f"delete these pods, so that new pods use another address ({error})"
            ) from None

    async def _ensure_network_policy(self, job: Job, plan: Plan, record: JobRecord) -> bool:
        """Create, change or delete the job's NetworkPolicy; return whether pods may be created."""
        if job.deleting or record.creates.rejected is not None:
            return False
        wanted = network_policy(job, self.settings) if plan.etcd else None
        if wanted is None:
            await self._delete_owned(client.NETWORK_POLICIES, job)
        elif record.creates.wait > 0:
            return False
        else:
            await self._ensure(client.NETWORK_POLICIES, job, wanted)
        return True

    async def _ensure_pod_group(self, job: Job, plan: Plan, record: JobRecord) -> bool:
        """Create, change or delete the job's PodGroup; return whether pods may be created."""
        if job.deleting or record.creates.rejected is not None:
            return not job.deleting
        gang = job.spec.scheduling.gang if plan.min_member is not None else None
        if gang is not None and record.creates.wait > 0:
            return bool(self.cache.owned_by(client.POD_GROUPS[gang], job.namespace, job.uid))
        for other, resource in client.POD_GROUPS.items():
            if other is not gang:
                await self._delete_owned(resource, job)
        if gang is not None and plan.min_member is not None:
            try:
                await self._ensure(client.POD_GROUPS[gang], job, owned.pod_group(job, gang, plan.min_member))
            except client.ApiError as error:
                if error.not_found:
                    raise Blocked(owned.not_installed(gang)) from None
                raise
        return True

    async def _ensure_pdb(self, job: Job, plan: Plan, record: JobRecord) -> None:
        """Create, change or delete the job's disruption budget. Pods are created even if the budget is rejected."""
        if job.deleting:
            return
        if plan.min_available is None:
            await self._delete_owned(client.DISRUPTION_BUDGETS, job)
        elif record.pdb.wait > 0:
            return
        else:
            try:
                await self._ensure(client.DISRUPTION_BUDGETS, job, owned.disruption_budget(job, plan.min_available))
            except (Rejected, Blocked) as error:
                why, known = f"the disruption budget of the job cannot be created for now: {error}", record.pdb.blocked
                if known is None or messages.clause(known) != messages.clause(why):  # the status contains the clause
                    logger.warning("%s: %s", record.key, why)
                record.pdb.block(why)
                return
            except ClusterError as error:
                raise ClusterError(f"the disruption budget of the job could not be created: {error}") from None
        record.pdb.succeed()

    async def _ensure(self, resource: client.Resource, job: Job, wanted: Json) -> None:
        existing = self.cache.owned_by(resource, job.namespace, job.uid)
        if not existing:
            await self.writer.create(resource, job, wanted)
            return
        about = get_dict(existing[0], "metadata")
        outdated = not about.get("deletionTimestamp") and not _contains(existing[0].get("spec"), wanted["spec"])
        if outdated and not await self.writer.apply(resource, job, about["uid"], wanted):
            await self.writer.create(resource, job, wanted)  # the object has been deleted

    async def _delete_owned(self, resource: client.Resource, job: Job) -> None:
        for body in self.cache.owned_by(resource, job.namespace, job.uid):
            about = get_dict(body, "metadata")
            if not about.get("deletionTimestamp"):
                await self.writer.delete(resource, about["namespace"], about["name"], about["uid"])

    async def _create_pods(self, job: Job, pods: Sequence[NewPod], endpoint: str, record: JobRecord) -> bool:
        """Create pods in growing batches: if the first pod is not accepted, no other pod is tried.

        Return whether pods are left after the time limit: the plan of the job may have changed by then.
        """
        done, batch = 0, 1
        begun = time.monotonic()
        while done < len(pods):
            bodies = (partial(worker_pod, job, new, self.settings, store=endpoint) for new in pods[done : done + batch])
            creates = (self.writer.create(client.PODS, job, body) for body in bodies)
            results = await asyncio.gather(*creates, return_exceptions=True)
            raise_worst(results)
            done += batch
            batch = min(batch * 2, _MAX_BATCH)
            if done < len(pods) and time.monotonic() - begun > _MAX_SECONDS:
                return True
        record.creates.succeed()
        return False

    async def _annotate_ports(self, job: Job) -> None:
        """Annotate the pods with the metrics ports that their agents have chosen, for Prometheus."""
        mirror = self.stores.of(job.uid)
        nodes = () if mirror is None else mirror.nodes.values()
        ports = {node.name: node.metrics for node in nodes if 0 < node.metrics <= MAX_PORT}
        writes = [
            self.writer.annotate(client.PODS, job.namespace, pod.name, pod.uid, owned.metrics_notes(job, port))
            for pod in self.cache.pods(job.namespace, job.uid)
            if pod.phase is PodPhase.RUNNING and not pod.terminating
            if (port := ports.get(pod.name, pod.metrics_port)) != pod.metrics_port
        ]
        errors = await asyncio.gather(*writes, return_exceptions=True)
        for error in errors:
            if isinstance(error, Rejected | Blocked):  # without the annotation, only Prometheus misses the pod
                logger.debug("%s/%s: a metrics port was not written on its pod: %s", job.namespace, job.name, error)
        raise_worst(error for error in errors if not isinstance(error, Rejected | Blocked))


def _contains(existing: object, wanted: object) -> bool:
    """Return whether an object contains all desired values; other values are ignored."""
    if isinstance(wanted, dict):
        return isinstance(existing, dict) and all(_contains(existing.get(key), value) for key, value in wanted.items())
    return existing == wanted
