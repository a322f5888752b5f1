"""NCCL in a process that stays when the world changes. It is used only if the program's environment chooses it.

NCCL's collectives run on the GPU. One whose peer is lost does not end. One that is aborted ends without an error and
leaves any numbers in its tensors, and it may also pass such numbers to other ranks, whose collective then succeeds. So
the ranks of a world with NCCL

- wait for the GPU at the beginning of each commit, and then for each other: a rank that was lost or has aborted does
  not arrive, so no rank commits numbers of a collective that has failed on any rank;
- take their state from the newest checkpoint or copy in memory after their world was broken, not from the GPU;
- exchange everything but the program's own tensors through gloo, in the memory of the host.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Final

from torchelastic.training.errors import NonRetryableException

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

IN_PLACE: Final = "TORCHELASTIC_NCCL_IN_PLACE"
"""The environment variable with which a program chooses this: ``1``; ``0`` or empty otherwise."""

BACKEND: Final = "cpu:gloo,cuda:nccl"

_ENVIRONMENT: Final[Mapping[str, str]] = {
    # Neither the watchdog nor the monitor of torch's process group aborts collectives or ends the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def is_chosen() -> bool:
    """Return whether the process may stay although it uses GPUs.

    Raises:
        NonRetryableException: the environment variable is neither ``0`` nor ``1`` nor empty.
    """
    value = os.environ.get(IN_PLACE, "")
    if value not in {"", "0", "1"}:
        raise NonRetryableException(f"{IN_PLACE}={value}: must be 1 for on or 0 for off.")
    return value == "1"


def prepare() -> None:
    """Set the variables that a process group reads when it is created."""
    os.environ.update(_ENVIRONMENT)


def communicators() -> list[Any]:
    """Return the backend for GPUs of each process group. That of gloo ignores :func:`abort`."""
    import torch
    import torch.distributed as dist

    found = []
    for group in [*dist.distributed_c10d._world.pg_map]:  # noqa: SLF001 - as torch does to abort all groups
        with contextlib.suppress(RuntimeError):  # the group has no backend for GPUs
            found.append(group._get_backend(torch.device("cuda")))  # noqa: SLF001
    return found


def abort(communicators: Iterable[Any]) -> None:
    """End all collectives; another thread may call this. Before its first collective, a group cannot be aborted."""
    for each in communicators:
        with contextlib.suppress(RuntimeError):
            each.abort()


def wait() -> None:
    """Wait until the current GPU has done everything that the program has started.

    Raises:
        RuntimeError: an operation has failed. The process cannot use the GPU any more.
    """
    import torch

    torch.cuda.synchronize()


def is_fatal(error: BaseException) -> bool:
    """Return whether a process cannot use its GPU any more after an error."""
    return "CUDA error" in f"{error}"
