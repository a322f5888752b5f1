"""What a node tells the others of a failure of one of its workers, or of its own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchelastic.agent.failure import code_of
from torchelastic.contract import FailureRecord

if TYPE_CHECKING:
    from torchelastic.agent.workers import WorkerExit
    from torchelastic.contract import EpochRecord, FailureKind
    from torchelastic.settings import AgentSettings


def of_worker(worker: WorkerExit, epoch: int, node: str, settings: AgentSettings) -> FailureRecord:
    """The failure of a worker.

    Args:
        worker: how it ended.
        epoch: the number of its epoch.
        node: the id of its node.
        settings: of that node's agent.
    """
    code = code_of(worker.exit_code)
    final = worker.final or code in settings.final_exit_codes
    return FailureRecord(
        epoch=epoch,
        rank=worker.rank,
        local_rank=worker.local_rank,
        node=node,
        exit_code=max(min(worker.exit_code, 255), -255),
        kind=worker.kind,
        host=settings.address,
        pid=worker.pid,
        message=worker.message,
        uptime=round(worker.uptime, 3),
        final=final,
        free=not final and code in settings.free_exit_codes,
    )


def of_node(
    epoch: EpochRecord, node: str, settings: AgentSettings, *, message: str, kind: FailureKind, began: float
) -> FailureRecord:
    """A failure that is a node's own, and no worker's; it stands for the node's first rank.

    Args:
        epoch: of which the node is a member.
        node: its id.
        settings: of its agent.
        message: what happened, in words.
        kind: how much of an explanation that is.
        began: when the epoch began there, by the monotonic clock.
    """
    return FailureRecord(
        epoch=epoch.number,
        rank=epoch.first_rank(node),
        local_rank=0,
        node=node,
        exit_code=1,
        kind=kind,
        host=settings.address,
        message=message,
        uptime=round(time.monotonic() - began, 3),
    )
