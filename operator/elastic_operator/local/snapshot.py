"""What is told of a run, as JSON: to the live view, over the control socket, and into the run's folder.

One shape for all three::

    manifest   the live object
    status     as in the CRD: state, replicas, ready, desired, readyDesired, epoch, worldSize, restarts, …
    pods       [{name, index, uid, pid, phase, ready, terminating, created, ended, exitCode, message,
                 groupRank, ranks, logDir, metricsUrl}]
    events     [{time, reason, message, warning}], the oldest first
    run        {id, directory, logs, checkpoints, pid, socket, manifestPath, alive, ended}
    etcd       {pid, endpoint, restarts}
    progress   {line, time}, the last line that rank 0 printed; null where it printed none

``run.ended`` is null while the run goes on, then {how, exitCode, message, time}; ``how`` is one of
:class:`elastic_operator.local.ending.How`. A record with ``ended: null`` of a run that is not alive is of one that was
killed. Times are seconds since the Unix epoch, those of ``status`` as Kubernetes writes them.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from elastic_operator.status_json import status_to_json

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_operator.local.cluster import LocalCluster, ToldEvent
    from elastic_operator.local.live_job import LiveJob
    from elastic_operator.local.pod_process import PodProcess
    from elastic_operator.local.run_folder import RunFolder
    from torchelastic.contract import EpochRecord

_PROGRESS_BYTES: Final = 8192
"""How far back a line of progress is looked for."""

_PROGRESS_CHARACTERS: Final = 500


def snapshot_of(live: LiveJob, cluster: LocalCluster, folder: RunFolder, run: dict[str, Any]) -> dict[str, Any]:
    """How the run stands now.

    Args:
        live: the job.
        cluster: where it runs.
        folder: the run's folder.
        run: what is to be said of the run itself.
    """
    mirror, etcd = cluster.mirror, cluster.etcd
    places = _places(mirror.epoch, mirror.names)
    urls = {
        node.name: f"http://{node.address}:{node.metrics}/metrics" for node in mirror.nodes.values() if node.metrics
    }
    return {
        "manifest": live.manifest,
        "status": status_to_json(live.status),
        "pods": [
            {
                **_pod(pod, ready=cluster.serves(pod)),
                "groupRank": places[pod.name][0] if pod.name in places else None,
                "ranks": list(places[pod.name][1]) if pod.name in places else [],
                "logDir": str(folder.pod_logs(pod.name)),
                "metricsUrl": urls.get(pod.name) if pod.ended is None else None,
            }
            for pod in sorted(cluster.pods, key=lambda pod: (pod.new.index, pod.created))
        ],
        "events": [_event(told) for told in cluster.events],
        "run": run,
        "etcd": {
            "pid": etcd.pid if etcd else None,
            "endpoint": etcd.endpoint if etcd else live.job().spec.etcd.endpoint,
            "restarts": etcd.restarts if etcd else 0,
        },
        "progress": _progress(mirror.epoch, mirror.names, folder),
    }


def _pod(pod: PodProcess, *, ready: bool) -> dict[str, Any]:
    observed = pod.observed(ready=ready)
    return {
        "name": observed.name,
        "index": observed.index,
        "uid": observed.uid,
        "pid": pod.pid,
        "phase": observed.phase.value,
        "ready": observed.ready,
        "terminating": observed.terminating,
        "created": observed.created,
        "ended": observed.ended,
        "exitCode": observed.exit_code,
        "message": msgspec.to_builtins(observed.message),
    }


def _event(told: ToldEvent) -> dict[str, Any]:
    event = told.event
    return {"time": told.time, "reason": str(event.reason), "message": event.message, "warning": event.warning}


def _places(epoch: EpochRecord | None, names: dict[str, str]) -> dict[str, tuple[int, range]]:
    """By pod, its place among the nodes of the epoch and the ranks of its workers."""
    places: dict[str, tuple[int, range]] = {}
    first = 0
    for group_rank, member in enumerate(epoch.members if epoch else ()):
        if name := names.get(member.node):
            places[name] = group_rank, range(first, first + member.workers)
        first += member.workers
    return places


def _progress(epoch: EpochRecord | None, names: dict[str, str], folder: RunFolder) -> dict[str, Any] | None:
    """The last line that rank 0 printed in this epoch."""
    if epoch is None or not epoch.members or (pod := names.get(epoch.members[0].node)) is None:
        return None
    output = folder.pod_logs(pod) / f"epoch_{epoch.number}" / "rank_0" / "output.log"
    return last_line(output)


def last_line(output: Path) -> dict[str, Any] | None:
    """The last line of a file that is not empty, and when the file was last written; None where there is none."""
    try:
        with output.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _PROGRESS_BYTES, 0))
            text = file.read(_PROGRESS_BYTES).decode(errors="replace")
            changed = os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
    # A progress bar ends its line with a carriage return.
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    return {"line": lines[-1][-_PROGRESS_CHARACTERS:], "time": changed} if lines else None
