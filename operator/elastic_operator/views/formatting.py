"""The text that ``elasticjob`` prints: durations, sizes, states, program output, and ``get`` and ``describe``."""

from __future__ import annotations

import codecs
import itertools
import os
import re
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from elastic_operator.controller.messages import count, signal_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from elastic_operator.views.job_view import JobView, PodView

_ESCAPES: Final = re.compile(
    r"(\x1b\[[0-9;:]*m)|\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])"
)
"""A control sequence of a terminal; the group is a color."""
_INCOMPLETE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]{0,256}\x1b?|[ -/]*)\Z")
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_INVISIBLE: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]"
)
_KEPT: Final = re.compile(r"(\x1b\[[0-9;:]*m|\r)")
_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
_TERMINATED: Final = 128 + signal.SIGTERM


def duration(seconds: float) -> str:
    """Format a duration like kubectl: 12s, 1m12s, 2h05m, 3d4h."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def since(moment: float | None, now: float) -> str:
    """Format the time since a moment; a dash if the moment is unknown."""
    return duration(now - moment) if moment else "-"


def short_duration(seconds: float) -> str:
    """Format a duration that may be below a second: 0s, 0.42ms, 12.3ms, 1.52s, 48s, 2m05s."""
    if seconds >= 60:
        return duration(seconds)
    if seconds >= 1:
        return f"{seconds:.3g}s"
    return f"{seconds * 1000:.3g}ms" if 0 < seconds < 0.9995 else f"{seconds:.0f}s"


def size(amount: float) -> str:
    """Format a number of bytes: 612 MiB, 1.4 GiB."""
    amount = max(0.0, amount)
    for unit in _BYTE_UNITS[:-1]:
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} {_BYTE_UNITS[-1]}"


def percent(ratio: float) -> str:
    """Format a ratio in percent: 87.1 %, 100 %, below 0.1 %."""
    value = ratio * 100
    if 0 < value < 0.05:
        return "below 0.1 %"
    return f"{value:.1f} %" if 0 < value < 99.95 else f"{value:.0f} %"


def printed(line: str) -> str:
    """Return what a terminal shows of a line: the text after the last carriage return, without control sequences."""
    visible = _ESCAPES.sub("", line).rstrip("\r\n").rpartition("\r")[2]
    return _CONTROLS.sub("", visible.expandtabs(4)).rstrip()


def visible(text: str) -> str:
    """Return a text without what a terminal does not show as characters: control sequences and format characters."""
    return _INVISIBLE.sub("", _ESCAPES.sub("", text))


class LogFilter:
    """Removes what :func:`visible` removes, except colors and carriage returns, from output that arrives in pieces."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._rest = ""

    def filtered(self, output: bytes) -> bytes:
        """Return the output up to the last complete control sequence."""
        text = self._rest + self._decoder.decode(output)
        end = found.start() if (found := _INCOMPLETE.search(text)) is not None else len(text)
        self._rest = text[end:]
        text = _ESCAPES.sub(lambda sequence: sequence[1] or "", text[:end])
        kept = "".join(
            part if number % 2 else _INVISIBLE.sub("", part) for number, part in enumerate(_KEPT.split(text))
        )
        return kept.encode(errors="surrogateescape")


def activity(pod: PodView) -> tuple[str, bool | None]:
    """Return a pod's activity in one or two words, and whether the pod is healthy; None if it is in transition."""
    if pod.over:
        code = pod.exit_code
        if code == 0 or pod.phase == "Succeeded":
            return "done", True
        if code is None or code == _TERMINATED:
            return "ended" if code is None else "left", None
        return signal_name(code) or f"failed ({code})", False
    if pod.terminating:
        return "leaving", None
    if pod.phase == "Pending" or not pod.ready:
        return "starting", None
    if pod.ranks is None:
        return "running", True
    if pod.spare:
        return "standing by", True
    return ("training", True) if pod.ranks else ("joining", None)


def rank_list(ranks: Sequence[int] | None) -> str:
    """Format sorted ranks as ranges: 0-3, 7; a dash stands for no or unknown ranks."""
    runs = itertools.groupby(enumerate(ranks or ()), key=lambda entry: entry[1] - entry[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans) or "-"


def home_relative(path: str) -> str:
    """Replace the user's home directory at the start of a path with ``~``."""
    full, home = Path(path), Path(os.path.expanduser("~"))
    return f"~/{full.relative_to(home)}" if path and full.is_relative_to(home) else path


def shell_path(path: str) -> str:
    """Return a path for a shell: quoted if necessary, otherwise with ``~`` for the home directory."""
    return home_relative(path) if shlex.quote(path) == path else shlex.quote(path)


def columns(rows: Iterable[Sequence[str]], indent: str = "") -> list[str]:
    """Lay out rows as lines, each column as wide as its widest cell."""
    kept = [tuple(cell.replace("\n", " ") for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]
    return [
        (indent + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in kept
    ]


def is_terminal(output: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether the output is a terminal that can show a live view; False with NO_COLOR or TERM=dumb."""
    return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb" and output.isatty()


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
            "SPARES": str(status.ready_spares),
            "RUN": job.run.id,
            "FOLDER": job.run.directory,
        }
        rows.append(row)
    hidden = set() if namespaces else {"NAMESPACE"}
    if not wide:
        hidden |= {"ROUND", "WORLD", "SPARES", "RUN", "FOLDER"}
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
    """Return the lines that describe a job in detail."""
    import yaml

    spec = yaml.safe_dump(dict(job.spec), sort_keys=False).splitlines()
    return [
        *_labeled(_facts(job, now)),
        "Spec:",
        *(f"  {line}" for line in spec),
        *_conditions(job, now),
        *_pods(job, now),
        *_events(job, now),
    ]


def _labeled(facts: Iterator[tuple[str, str]]) -> list[str]:
    kept = [(label, value) for label, value in facts if value]
    widest = max(len(label) for label, _ in kept)
    lines = (f"{label + ':':<{widest + 2}} {value}".splitlines() for label, value in kept)
    return [f"  {line}" if number else line for value in lines for number, line in enumerate(value)]


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
    pods = f"{status.desired} desired, {status.replicas} current, {status.ready_replicas} ready"
    yield "Pods", "" if job.completed else pods
    spares = job.spec.get("spares")
    yield "Spares", f"{spares} desired, {status.ready_spares} ready" if spares and not job.completed else ""
    yield "Round", f"{status.round}, world size {status.world_size}" if status.round else "none yet"
    yield "Restarts", f"{status.restarts} charged, {status.uncharged_restarts} uncharged"
    yield "Pod Failures", str(status.pod_failures or "")
    if (failure := status.last_failure) is not None and failure.message:
        ago = f" ({duration(now - failure.time)} ago)" if failure.time else ""
        yield "Last Failure", failure.message + ago
    yield "Deadline", f"in {duration(job.deadline - now)}" if job.deadline is not None else ""
    yield "Excluded Nodes", ", ".join(status.excluded_nodes)
    yield "Progress", job.progress.line if job.progress else ""
    yield "Manifest", run.manifest_path
    yield "Logs", run.logs
    yield "Checkpoints", run.checkpoints
    if etcd and etcd.endpoint:
        restarts = f", restarted {count(etcd.restarts, 'time')}" if etcd.restarts else ""
        yield "Etcd", etcd.endpoint + (f" (process {etcd.pid}{restarts})" if etcd.pid else "")


def _behind(job: JobView) -> str:
    """Return a remark if the status is older than the spec, else an empty string."""
    generation = job.metadata.get("generation")
    if not job.on_cluster or not isinstance(generation, int) or job.status.observed_generation >= generation:
        return ""
    if job.status.observed_generation:
        return " (the operator has not seen the latest change of the spec yet)"
    return " (no operator has handled it yet; is an operator installed that watches this namespace?)"


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
        lines += [f"    {line}" for line in _labeled(_pod(pod, now))]
    return lines


def _pod(pod: PodView, now: float) -> Iterator[tuple[str, str]]:
    word, _ = activity(pod)
    yield "State", word if pod.exit_code is None or str(pod.exit_code) in word else f"{word}, exit code {pod.exit_code}"
    yield "Age", duration((pod.ended or now) - pod.created)
    yield "Node", pod.node + (f" (pod address {pod.address})" if pod.address else "")
    yield "Agent", f"process {pod.pid}" if pod.pid and not pod.over else ""
    yield "Ranks", rank_list(pod.ranks) if pod.ranks else ""
    yield "Note", pod.note
    yield "Message", pod.message
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
