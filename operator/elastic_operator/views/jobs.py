"""The output of ``elasticjob get`` and ``elasticjob describe``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_operator.controller.messages import count
from elastic_operator.views.formatting import activity, columns, duration, printed, rank_list, since

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elastic_operator.views.job_view import JobView, PodView

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def table(jobs: Sequence[JobView], now: float, *, wide: bool = False, namespaces: bool = False) -> list[str]:
    """Return the jobs in the columns of ``kubectl get elasticjobs``."""
    rows = []
    for job in jobs:
        status = job.status
        row = {
            "NAMESPACE": job.namespace,
            "NAME": job.name,
            "STATE": job.state,
            "READY": status.ready,
            "MIN": str(job.spec.get("minReplicas", "")),
            "MAX": str(job.spec.get("maxReplicas", "")),
            "RESTARTS": str(status.restarts),
            "AGE": since(job.created, now),
            "ROUND": str(status.round),
            "WORLD": str(status.world_size),
            "RUN": job.run.id,
            "FOLDER": job.run.directory,
        }
        rows.append(row)
    hidden = set() if namespaces else {"NAMESPACE"}
    if not wide:
        hidden |= {"ROUND", "WORLD", "RUN", "FOLDER"}
    if not any(row["RUN"] for row in rows):
        hidden |= {"RUN", "FOLDER"}
    titles = [title for title in rows[0] if title not in hidden]
    return columns([titles, *([row[title] for title in titles] for row in rows)])


def objects(jobs: Sequence[JobView], form: str, *, single: bool) -> str:
    """Return the jobs as ``kubectl get -o json`` or ``-o yaml`` does."""
    objects = [job.manifest | ({"status": job.status_json} if job.status_json else {}) for job in jobs]
    whole = objects[0] if single else {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": objects}
    if form == "json":
        import json

        return json.dumps(whole, indent=4) + "\n"
    import yaml

    return str(yaml.safe_dump(whole, sort_keys=False))


def description(job: JobView, now: float) -> list[str]:
    """Return the lines of all information about a job."""
    import yaml

    spec = yaml.safe_dump(dict(job.spec), sort_keys=False).splitlines()
    return [
        *_labelled(_facts(job, now)),
        "Spec:",
        *(f"  {line}" for line in spec),
        *_conditions(job, now),
        *_pods(job, now),
        *_events(job, now),
    ]


def _labelled(facts: Iterator[tuple[str, str]]) -> list[str]:
    kept = [(label, value) for label, value in facts if value]
    widest = max(len(label) for label, _ in kept)
    return [f"{label + ':':<{widest + 2}} {value}" for label, value in kept]


def _facts(job: JobView, now: float) -> Iterator[tuple[str, str]]:
    status, run, etcd = job.status, job.run, job.etcd
    yield "Name", job.name
    yield "Namespace", job.namespace if job.on_cluster else ""
    yield "Run", run.id + (f" (process {run.pid})" if run.alive and run.pid else "")
    yield "UID", str(job.metadata.get("uid") or "")
    for label, values in (("Labels", job.metadata.get("labels")), ("Annotations", job.metadata.get("annotations"))):
        yield label, ", ".join(f"{key}={value}" for key, value in (values or {}).items() if key != _LAST_APPLIED)
    yield "State", job.state + _behind(job)
    yield "Age", duration(now - job.created) if job.created else ""
    yield "Took", duration(job.age(now)) if job.completed else ""
    yield "Pods", f"{status.ready_replicas} ready of {status.desired} wanted, {status.replicas} in total"
    yield "Round", f"{status.round}, world size {status.world_size}" if status.round else "none yet"
    yield "Restarts", f"{status.restarts} charged, {status.uncharged_restarts} uncharged"
    yield "Pods Died", str(status.pod_failures or "")
    yield "Last Failure", _last_failure(job, now).replace("\n", "\n  ")
    yield "Deadline", f"in {duration(job.deadline - now)}" if job.deadline is not None else ""
    yield "Excluded Nodes", ", ".join(status.excluded_nodes)
    yield "Progress", job.progress.line if job.progress else ""
    yield "Manifest", run.manifest_path
    yield "Logs", run.logs
    yield "Checkpoints", run.checkpoints
    if etcd and etcd.endpoint:
        restarts = f", started again {count(etcd.restarts, 'time')}" if etcd.restarts else ""
        yield "Etcd", etcd.endpoint + (f" (process {etcd.pid}{restarts})" if etcd.pid else "")


def _last_failure(job: JobView, now: float) -> str:
    failure = job.status.last_failure
    if failure is None or not failure.message:
        return ""
    return failure.message + (f" ({duration(now - failure.time)} ago)" if failure.time else "")


def _behind(job: JobView) -> str:
    """Return a remark if the status is older than the spec."""
    generation = job.metadata.get("generation")
    if not job.on_cluster or not isinstance(generation, int) or job.status.observed_generation >= generation:
        return ""
    if job.status.observed_generation:
        return " (the operator has not seen the latest change of the spec yet)"
    return " (no operator has taken it up yet; is one installed that watches this namespace?)"


def _conditions(job: JobView, now: float) -> list[str]:
    if not job.status.conditions:
        return []
    rows = [
        (each.type, str(each.status), since(each.since or None, now), each.reason, each.message)
        for each in job.status.conditions
    ]
    rows.insert(0, ("TYPE", "STATUS", "SINCE", "REASON", "MESSAGE"))
    return ["Conditions:", *columns(rows, "  ")]


def _pods(job: JobView, now: float) -> list[str]:
    lines = ["Pods:" if job.pods else "Pods: none"]
    for pod in (*job.living_pods, *job.ended_pods):
        lines.append(f"  {pod.name}")
        lines += [f"    {line}" for line in _labelled(_pod(pod, now))]
    return lines


def _pod(pod: PodView, now: float) -> Iterator[tuple[str, str]]:
    word, _ = activity(pod)
    yield "State", word if pod.exit_code is None or str(pod.exit_code) in word else f"{word}, exit code {pod.exit_code}"
    yield "Age", duration((pod.ended or now) - pod.created)
    yield "Node", pod.node + (f" (pod address {pod.address})" if pod.address else "")
    yield "Agent", f"process {pod.pid}" if pod.pid and not pod.over else ""
    yield "Ranks", rank_list(pod.ranks) if pod.ranks else ""
    yield "Note", pod.note.replace("\n", "\n      ")
    yield "Last Words", pod.message.replace("\n", "\n      ")
    yield "Logs", pod.log_dir or ""
    yield "Metrics", pod.metrics_url or ""


def _events(job: JobView, now: float) -> list[str]:
    if not job.events:
        return ["Events: none"]
    rows = [("TYPE", "AGE", "REASON", "MESSAGE")]
    for event in job.events:
        message = printed(event.message.replace("\n", " ")) + (f" ({event.count} times)" if event.count > 1 else "")
        rows.append(("Warning" if event.warning else "Normal", duration(now - event.time), event.reason, message))
    return ["Events:", *columns(rows, "  ")]
