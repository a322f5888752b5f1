"""From an epoch to the workers' environment: ranks are computed from the record, not exchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.contract import EpochRecord


def worker_environments(
    epoch: EpochRecord, node: str, *, role: str, run_id: str, max_restarts: int
) -> list[dict[str, str]]:
    """The documented environment of each worker of one node, by local rank.

    All but LOCAL_RANK, RANK and ROLE_RANK is equal on all workers of a node, and what comes from the epoch alone is
    equal on all workers of the run.

    Args:
        epoch: a record that has the node among its members.
        node: the node's id.
        role: the workers' role; all nodes of a run have the same.
        run_id: the run's id.
        max_restarts: how many failures the run may have.

    Raises:
        ValueError: the node is no member of the epoch.
    """
    group_rank = epoch.nodes.index(node)
    first = epoch.first_rank(node)
    workers = epoch.members[group_rank].workers
    host, _, port = epoch.store.rpartition(":")
    shared = {
        "GROUP_RANK": str(group_rank),
        "GROUP_WORLD_SIZE": str(len(epoch.members)),
        "LOCAL_WORLD_SIZE": str(workers),
        "WORLD_SIZE": str(epoch.world_size),
        "ROLE_NAME": role,
        "ROLE_WORLD_SIZE": str(epoch.world_size),
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_EPOCH": str(epoch.number),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RESTART_COUNT": str(epoch.restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        # The epoch's store is served beside the workers, so that it outlives any one of them.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return [
        shared | {"LOCAL_RANK": str(local), "RANK": str(first + local), "ROLE_RANK": str(first + local)}
        for local in range(workers)
    ]
