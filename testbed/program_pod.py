"""A pod in which a test runs programs that launch functions: the operator's image, which has the Kubernetes client."""

from __future__ import annotations

import json
from pathlib import Path

import cloudpickle


def program_pod(name: str, files: Path, *, host_network: bool = False, **environ: str) -> str:
    """Return the manifest of a pod that sleeps; programs are executed in it.

    Args:
        name: the name of the pod.
        files: a folder of this machine, which is /files in the pod; /files/code has the modules of the programs.
        host_network: whether the pod has the network of the node, as a program outside of the cluster has.
        environ: more variables.
    """
    env = {"PYTHONPATH": "/packages:/files/code", **environ}
    container = {
        "name": "main",
        "image": "elastic-operator:dev",
        "imagePullPolicy": "Never",
        "command": ["sleep", "infinity"],
        "workingDir": "/tmp",
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "volumeMounts": [
            {"name": "cloudpickle", "mountPath": "/packages/cloudpickle"},
            {"name": "files", "mountPath": "/files"},
        ],
    }
    volumes = [
        {"name": "cloudpickle", "hostPath": {"path": f"{Path(cloudpickle.__file__).parent}"}},
        {"name": "files", "hostPath": {"path": f"{files}"}},
    ]
    spec = {
        "hostNetwork": host_network,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": volumes,
    }
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
