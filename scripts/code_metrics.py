"""Measure the size and the structure of the project, which determine the effort of its maintenance.

    .venv/bin/python -m scripts.code_metrics [--static]

Prints, as JSON: the lines of each package; the import cycles; the modules that run between a worker's crash and the
start of its successor; the modules that run between ``kubectl apply`` and the creation of the pods; and the path of a
job through ``plan()``. The last three come from real runs with etcd, an API server and workers, so they need the test
bed (``make testbed``). With ``--static``, only the first two are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = {"agent": ROOT / "agent/torchelastic", "operator": ROOT / "operator/elastic_operator"}

_TRACER: Final = """
import atexit, enum, os, sys, threading, time
_ROOTS = tuple(os.environ["CODE_METRICS_ROOTS"].split(":"))
_LOG = os.environ["CODE_METRICS_LOG"]
_last = None
_depth = 0
_walk = []
_names = set()

def _is_part(value):
    if isinstance(value, (dict, list, tuple)) and value:
        value = next(iter(value.values() if isinstance(value, dict) else value))
    kind = type(value)
    return kind.__module__.startswith(("elastic_operator.", "torchelastic.")) and not issubclass(kind, enum.Enum)

def _write(*words):
    log = os.open(_LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, (" ".join(map(str, words)) + "\\n").encode())
    os.close(log)

def _profile(frame, event, arg):
    global _last, _depth
    if event not in ("call", "return"):
        return
    file = frame.f_code.co_filename
    if not file.startswith(_ROOTS):
        return
    if file != _last:
        _last = file
        _write("module", time.monotonic(), file)
    is_plan = frame.f_code.co_name == "plan" and file.endswith("controller/plan.py")
    if event == "call" and is_plan:
        _depth = 1
        _walk.clear()
        _names.clear()
    if _depth:
        if event == "call" and (not _walk or _walk[-1] != file):
            _walk.append(file)
        if event == "return":
            _names.update(name for name, value in frame.f_locals.items() if name[0] != "." and _is_part(value))
        if event == "return" and is_plan:
            _depth = 0
            _write("plan", "|".join(_walk), "|".join(sorted(_names)))

sys.setprofile(_profile)
threading.setprofile(_profile)
atexit.register(sys.setprofile, None)  # the interpreter clears this module before it deletes the last objects
"""
"""The ``sitecustomize`` of all Python processes of a run; it cannot use ``sys.monitoring``, new in Python 3.12."""

_PROGRAM: Final = """
import os, signal, sys, time
with open(sys.argv[1], "a") as file:
    print(time.monotonic(), file=file, flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""A worker that appends the time of each start to a file, and kills itself in its first round."""


@dataclass(frozen=True)
class Trace:
    """The trace of a run; ``lines`` has the lines that all its processes have written."""

    lines: tuple[str, ...]

    def modules(self, begin: float, end: float) -> list[str]:
        """Return the names of the modules that ran between two times of the monotonic clock."""
        found = set()
        for line in self.lines:
            kind, _, rest = line.partition(" ")
            time, _, file = rest.partition(" ")
            if kind == "module" and begin <= float(time) <= end:
                found.add(_module(file))
        return sorted(found)

    def plans(self) -> list[tuple[list[str], list[str]]]:
        """Return, for each call of ``plan()``, the files in the order of their use, and the names of the job's parts.

        The names are those of local variables whose value has a type of the project, or is a collection of such values:
        the job, its spec and status, pods, the parts of a plan. Numbers, times, texts, flags and enums do not count.
        """
        plans = [line.split(" ") for line in self.lines if line.startswith("plan ")]
        return [(files.split("|"), names.split("|")) for _, files, names in plans]


def lines_by_package() -> dict[str, Any]:
    """Return the number of lines of all Python files, by package and in total."""
    counted: dict[str, Any] = {}
    for name, folder in PACKAGES.items():
        by_package = Counter[str]()
        for file in folder.rglob("*.py"):
            inside = file.relative_to(folder)
            by_package[inside.parts[0] if len(inside.parts) > 1 else "."] += _lines(file)
        counted[name] = {"total": by_package.total(), "modules": len(list(folder.rglob("*.py"))), **by_package}
    for name in ("tests", "testbed", "benchmarks", "scripts"):
        counted[name] = sum(_lines(file) for file in (ROOT / name).rglob("*.py"))
    return counted


def import_cycles() -> list[list[str]]:
    """Return the groups of modules that import each other, directly or indirectly; imports for typing do not count."""
    import grimp

    graph = grimp.build_graph("torchelastic", "elastic_operator", exclude_type_checking_imports=True)
    reached = {module: graph.find_downstream_modules(module) for module in graph.modules}
    groups = {frozenset({module} | {o for o in reached[module] if module in reached[o]}) for module in graph.modules}
    return sorted(sorted(group) for group in groups if len(group) > 1)


async def crash_path() -> list[str]:
    """Return the modules that run between the SIGKILL of a worker and the start of its successor."""
    from tests.support.etcd import EtcdServer

    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "program.py").write_text(_PROGRAM)
        starts = here / "starts"
        async with EtcdServer(here) as etcd:
            address = etcd.endpoint.removeprefix("http://")
            command = ("--nnodes=1", "--max-restarts=1", f"--rdzv-endpoint={address}", "--rdzv-id=code-metrics")
            run = Path(sys.executable).with_name("torchelastic-run")
            argv = (str(run), *command, str(here / "program.py"), str(starts))
            process = await asyncio.create_subprocess_exec(*argv, env=_traced(here), stdout=subprocess.DEVNULL)
            if await process.wait():
                raise SystemExit("the traced run failed; see its output above")
        killed, started = map(float, starts.read_text().split())
        return _trace(here).modules(killed, started)


async def apply_path() -> tuple[list[str], dict[str, int]]:
    """Return the modules that run from ``kubectl apply`` until all pods exist, and the path through ``plan()``."""
    from testbed.control_plane import ControlPlane
    from tests.support.operator_process import OperatorProcess

    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        async with ControlPlane(here) as cluster:
            await cluster.apply_crd((ROOT / "crds/elasticjob.yaml").read_text())
            async with OperatorProcess(here, cluster.kubeconfig, environ=_traced(here)):
                selector = "--selector=elastic.pytorch.org/job=digits,elastic.pytorch.org/role=worker"
                watch = await asyncio.create_subprocess_exec(
                    *("kubectl", "get", "pods", selector, "--watch", "--output=name"),
                    env=cluster.environ,
                    stdout=subprocess.PIPE,
                )
                assert watch.stdout is not None
                begin = asyncio.get_running_loop().time()
                await cluster.kubectl("apply", "--filename", str(ROOT / "examples/digits.yaml"))
                pods = set[bytes]()
                while len(pods) < 2:
                    pods.add(await watch.stdout.readline())
                end = asyncio.get_running_loop().time()
                watch.terminate()
                await watch.wait()
        trace = _trace(here)
        return trace.modules(begin, end), _way_through_plan(trace)


def _way_through_plan(trace: Trace) -> dict[str, int]:
    """Return the maxima of all calls of ``plan()``: files, returns to an earlier file, names of the job's parts."""
    plans = trace.plans()
    return {
        "files": max(len(set(files)) for files, _ in plans),
        "returns": max(len(files) - len(set(files)) for files, _ in plans),
        "names": max(len(names) for _, names in plans),
    }


def _traced(folder: Path) -> dict[str, str]:
    """Return the environment variables of a traced run, which writes its trace into a folder."""
    (folder / "sitecustomize.py").write_text(_TRACER)
    roots = ":".join(str(package) for package in PACKAGES.values())
    return {
        **os.environ,
        "PYTHONPATH": str(folder),
        "CODE_METRICS_LOG": str(folder / "trace"),
        "CODE_METRICS_ROOTS": roots,
    }


def _trace(folder: Path) -> Trace:
    return Trace(tuple((folder / "trace").read_text().splitlines()))


def _module(file: str) -> str:
    inside = next(
        Path(file).relative_to(package.parent) for package in PACKAGES.values() if file.startswith(str(package))
    )
    return ".".join(inside.with_suffix("").parts).removesuffix(".__init__")


def _lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.code_metrics", description="Measure the size of the project."
    )
    parser.add_argument("--static", action="store_true", help="count lines and import cycles only")
    counted: dict[str, Any] = {"lines": lines_by_package(), "import_cycles": import_cycles()}
    if not parser.parse_args().static:
        crash = asyncio.run(crash_path())
        applied, plan = asyncio.run(apply_path())
        counted["worker_crash_to_new_workers"] = {"modules": len(crash), "names": crash}
        counted["kubectl_apply_to_pods"] = {"modules": len(applied), "names": applied}
        counted["plan"] = plan
    json.dump(counted, sys.stdout, indent=2)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
