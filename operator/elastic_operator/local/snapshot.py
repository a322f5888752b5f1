"""The state of a run as JSON, for the live view, the control socket and the run's directory.

A snapshot holds::

    manifest   the live object
    status     as in the CRD: state, replicas, readyReplicas, desired, readyDesired, round, worldSize, restarts, …
    pods       [{name, index, uid, pid, phase, ready, terminating, created, ended, exitCode, message,
                 groupRank, ranks, logDir, metricsUrl}]
    events     [{time, reason, message, warning}], the oldest first
    run        {id, directory, logs, checkpoints, pid, socket, manifestPath, alive, ended}
    etcd       {pid, endpoint, restarts}
    progress   {line, time}: the last line that rank 0 printed; null if it printed none

``run.ended`` is null while the run lasts, then {how, exitCode, message, time}; ``how`` is an
:class:`elastic_operator.local.runner.EndReason`. A run that is not alive and has ``ended: null`` was killed. Times are
seconds since the Unix epoch; those in ``status`` are written as Kubernetes writes them.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from elastic_operator.api.status import status_to_json

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_operator.local.backend import LocalBackend
    from elastic_operator.local.job import LiveJob
    from elastic_operator.local.processes import PodProcess
    from elastic_operator.local.run_dir import RunDir
    from torchelastic.protocol import RoundRecord

    Snapshot = dict[str, Any]

_PROGRESS_BYTES: Final = 8192
_PROGRESS_CHARACTERS: Final = 500


def snapshot_of(live: LiveJob, backend: LocalBackend, files: RunDir, run: Snapshot) -> Snapshot:
    """Return the state of a run; ``run`` is the value of that key."""
    mirror, etcd = backend.mirror, backend.etcd
    ranks = _ranks(mirror.round, mirror.names)
    urls = {
        node.name: f"http://{node.address}:{node.metrics}/metrics" for node in mirror.nodes.values() if node.metrics
    }

    def pod_json(pod: PodProcess) -> Snapshot:
        seen = pod.observed(ready=backend.serves(pod))
        group_rank, of_pod = ranks.get(pod.name, (None, []))
        return {
            "name": seen.name,
            "index": seen.index,
            "uid": seen.uid,
            "pid": pod.pid,
            "phase": seen.phase.value,
            "ready": seen.ready,
            "terminating": seen.terminating,
            "created": seen.created,
            "ended": seen.ended,
            "exitCode": seen.exit_code,
            "message": msgspec.to_builtins(seen.message),
            "groupRank": group_rank,
            "ranks": of_pod,
            "logDir": str(files.logs / pod.name),
            "metricsUrl": urls.get(pod.name) if pod.ended is None else None,
        }

    return {
        "manifest": live.manifest,
        "status": status_to_json(live.status),
        "pods": [pod_json(pod) for pod in sorted(backend.pods, key=lambda pod: (pod.new.index, pod.created))],
        "events": [
            {"time": time, "reason": str(event.reason), "message": event.message, "warning": event.warning}
            for time, event in backend.events
        ],
        "run": run,
        "etcd": {
            "pid": etcd.pid if etcd else None,
            "endpoint": etcd.endpoint if etcd else live.job().spec.etcd.endpoint,
            "restarts": etcd.restarts if etcd else 0,
        },
        "progress": _progress(mirror.round, mirror.names, files),
    }


def _ranks(round: RoundRecord | None, names: dict[str, str]) -> dict[str, tuple[int, list[int]]]:
    """Return the group rank and the ranks of each pod in the round."""
    found: dict[str, tuple[int, list[int]]] = {}
    first = 0
    for group_rank, member in enumerate(round.members if round else ()):
        if name := names.get(member.node):
            found[name] = group_rank, list(range(first, first + member.workers))
        first += member.workers
    return found


def _progress(round: RoundRecord | None, names: dict[str, str], files: RunDir) -> Snapshot | None:
    if round is None or not round.members or (pod := names.get(round.members[0].node)) is None:
        return None
    return last_line(files.logs / pod / f"round_{round.number}" / "rank_0" / "output.log")


def last_line(output: Path) -> Snapshot | None:
    """Return the last line of a file that is not blank, and the time of the last write; None if there is none."""
    try:
        with output.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _PROGRESS_BYTES, 0))
            text = file.read(_PROGRESS_BYTES).decode(errors="replace")
            changed = os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]  # a progress bar ends its line with \r
    return {"line": lines[-1][-_PROGRESS_CHARACTERS:], "time": changed} if lines else None
