"""Reads the worker of a job from its spec and its pod template: the container, the program and the environment.

The CRD leaves the template opaque, so any value in it may have an unexpected type.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Final

from elastic_operator.api.json_access import listing, mappings
from elastic_operator.api.legacy import WORKER

if TYPE_CHECKING:
    from elastic_operator.api.spec import AppliedSpec, Json

__all__ = ["NEVER", "WORKER", "mounted_folders", "program_of", "user_env", "worker_container"]

NEVER: Final = "Never"
"""The restart policy of every pod: only the operator replaces pods."""


def worker_container(spec: AppliedSpec) -> Json:
    """The template's container ``worker``; an empty one if the template has none."""
    containers = mappings(spec.template, "spec", "containers")
    return next((container for container in containers if container.get("name") == WORKER), {})


def mounted_folders(container: Json) -> frozenset[str]:
    """The folders of a container with volumes."""
    paths = (mount.get("mountPath") for mount in mappings(container, "volumeMounts"))
    return frozenset(posixpath.normpath(path) for path in paths if isinstance(path, str) and path)


def program_of(spec: AppliedSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The command and the arguments, from the spec or from the template's container ``worker``."""
    container = worker_container(spec)
    return (
        spec.command or tuple(str(item) for item in listing(container, "command")),
        spec.args or tuple(str(item) for item in listing(container, "args")),
    )


def user_env(spec: AppliedSpec) -> tuple[Json, ...]:
    """The user's environment variables, each as in a container's spec: the template's, then the spec's."""
    return (*mappings(worker_container(spec), "env"), *spec.env)
