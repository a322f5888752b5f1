"""How a pod template is completed: what it says stays, what it leaves open is filled in.

A template may be anything. A value that has not the form of what should stand in its place stays as it is: the API
server then refuses the pod, and its words name the field.
"""

from __future__ import annotations

import copy
import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.api.json_access import listing, mapping, mappings, text
from elastic_operator.api.template import mounted_folders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_operator.api.spec import Json

RESTRICTED: Final[Json] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""What a container's security context says beside its pod's. Together they are what the pod security standard
``restricted`` asks for, but for a user that is not root: that is for those to say who know the image."""

SECCOMP: Final[Json] = {"seccompProfile": {"type": "RuntimeDefault"}}
"""What a pod's security context says."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of a container that is to be on a volume.

    Attributes:
        path: where it is.
        name: of the volume, where that is free.
        source: what the volume is.
        read_only: whether the container may only read it.
    """

    path: str
    name: str
    source: Json
    read_only: bool = False


def completed(given: object, defaults: Json) -> object:
    """A mapping with defaults for what it leaves open, null included, and in the mappings that are in it likewise."""
    return given if given is not None and not isinstance(given, dict) else completed_mapping(given or {}, defaults)


def completed_mapping(given: Json, defaults: Json) -> dict[str, Any]:
    """:func:`completed` for what is known to be a mapping."""
    result = dict(given)
    for key, default in defaults.items():
        if isinstance(default, dict):
            result[key] = completed(result.get(key), default)
        elif result.get(key) is None:
            result[key] = copy.deepcopy(default)
    return result


def extended(given: object, more: Sequence[object]) -> object:
    """A list with more at its end."""
    return given if given is not None and not isinstance(given, list) else [*listing(given), *more]


def with_folders(pod: dict[str, Any], container: dict[str, Any], folders: Sequence[Folder]) -> None:
    """Add volumes for those folders where the container has none yet.

    Args:
        pod: the pod's spec; its volumes are changed.
        container: one of its containers; its mounts are changed.
        folders: which.
    """
    there = mounted_folders(container)
    taken = {text(volume, "name") for volume in mappings(pod, "volumes")}
    for folder in folders:
        if posixpath.normpath(folder.path) in there:
            continue
        name, number = folder.name, 2
        while name in taken:
            name, number = f"{folder.name}-{number}", number + 1
        taken.add(name)
        pod["volumes"] = extended(pod.get("volumes"), [{**folder.source, "name": name}])
        mount: dict[str, Any] = {"name": name, "mountPath": folder.path}
        if folder.read_only:
            mount["readOnly"] = True
        container["volumeMounts"] = extended(container.get("volumeMounts"), [mount])


def restricted(context: object) -> object:
    """A container's security context, with no more rights than it asks for."""
    defaults = dict(RESTRICTED)
    asked = mapping(context)
    # The API server refuses to have these and no escalation of privileges.
    if asked.get("privileged") is True or "CAP_SYS_ADMIN" in listing(asked, "capabilities", "add"):
        del defaults["allowPrivilegeEscalation"]
    return completed(context, defaults)
