"""Measure launches in pods of a real Kubernetes with one node; see :mod:`benchmarks.launcher`."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.support.report import Measurement, note
from testbed import images
from testbed.node import Node
from testbed.program_pod import program_pod

if TYPE_CHECKING:
    from benchmarks.support.report import Report
    from testbed.cluster import Cluster

_CHART: Final = Path(__file__).parents[2] / "charts"
_WORKERS: Final = 2
_PROGRAM: Final = """
import json, sys, time
import torchelastic.launcher as trx
from functions import ranks

place = {"image": "elastic-agent:dev", "workers": 2, "workers_per_host": 1, "code": "/files/code"}
launcher = trx.Launcher("kubernetes", **place)
seconds = []
for keep in (True, False):
    launcher.keep = keep
    began = time.monotonic()
    assert launcher.run(ranks, log_handlers=[]).by_ranks() == [0, 1]
    seconds.append(time.monotonic() - began)
print(json.dumps(seconds))
"""
_FUNCTIONS: Final = """
def ranks():
    import torch.distributed as dist
    return dist.get_rank()
"""
_PLAIN: Final = """
import torch
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:29500", rank=0, world_size=1)
"""


async def measure_pods(report: Report, repeat: int) -> None:
    """Add the measurements to the report.

    Raises:
        Missing: a part of the test bed is missing.
    """
    plain: list[float] = []
    first: list[float] = []
    second: list[float] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-launcher-") as folder:
        (code := Path(folder) / "files" / "code").mkdir(parents=True)
        Path(folder).chmod(0o755)
        (code / "functions.py").write_text(_FUNCTIONS)
        (Path(folder) / "node").mkdir()
        async with Node(Path(folder) / "node") as node:
            for name, tag in images.IMAGES.items():
                await node.load_image(tag, images.archive(name))
            await node.run("helm", "install", "elastic-operator", f"{_CHART}", "--wait", timeout=180)
            config = code.parent / "kubeconfig"
            config.write_text((await node.kubectl("config", "view", "--flatten", "--raw")).stdout)
            config.chmod(0o644)
            pod = program_pod("laptop", code.parent, host_network=True, KUBECONFIG="/files/kubeconfig")
            await node.kubectl("apply", "-f", "-", stdin=pod)
            await node.kubectl("wait", "pod/laptop", "--for=condition=Ready", "--timeout=120s", timeout=150)
            for number in range(1, repeat + 1):
                plain.append(await _plain(node))
                done = await node.kubectl("exec", "laptop", "--", "python3", "-c", _PROGRAM, timeout=300)
                one, two = json.loads(done.stdout.splitlines()[-1])
                first.append(one)
                second.append(two)
                note(f"kubernetes {number}/{repeat}: plain pods {plain[-1]:.3f} s, {one:.3f} s, then {two:.3f} s")
    call = "from the call of the launcher to its return"
    plain_pods = "two pods that import torch and create a process group, from their creation to their end"
    report.add(
        Measurement(
            "launch in two pods; plain pods",
            first,
            plain,
            baseline_name="plain pods",
            includes=call,
            ours_at_most=6.0,
            details={"baseline": plain_pods},
        )
    )
    report.add(
        Measurement(
            "launch beyond the plain pods",
            [max(ours - theirs, 0.0) for ours, theirs in zip(first, plain, strict=True)],
            includes=call,
            ours_at_most=1.0,
        )
    )
    report.add(Measurement("launch in the pods of a kept job", second, includes=call, ours_at_most=2.0))


async def _plain(cluster: Cluster) -> float:
    """Return the seconds in which two plain pods import torch and end."""
    names = [f"plain-{number}" for number in range(_WORKERS)]
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "restartPolicy": "Never",
                "containers": [
                    {
                        "name": "main",
                        "image": "elastic-agent:dev",
                        "imagePullPolicy": "Never",
                        "command": ["python3", "-c", _PLAIN],
                    }
                ],
            },
        }
        for name in names
    ]
    began = time.monotonic()
    await cluster.kubectl("apply", "-f", "-", stdin="\n---\n".join(map(json.dumps, pods)))
    done = "--for=jsonpath={.status.phase}=Succeeded"
    await cluster.kubectl("wait", *(f"pod/{name}" for name in names), done, "--timeout=120s", timeout=150)
    seconds = time.monotonic() - began
    await cluster.kubectl("delete", "pod", *names, "--now")
    return seconds
