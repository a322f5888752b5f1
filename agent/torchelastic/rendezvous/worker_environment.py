"""From a round to the workers' environment: ranks are computed from the record, not exchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.protocol import RoundRecord


def worker_environments(
    round: RoundRecord, node: str, *, role: str, run_id: str, max_restarts: int
) -> list[dict[str, str]]:
    """Return the documented environment of each worker of one node, by local rank.

    All but LOCAL_RANK, RANK and ROLE_RANK is equal on all workers of a node, and what comes from the round alone is
    equal on all workers of the run.

    Args:
        round: a record that has the node among its members.
        node: the node's id.
        role: the workers' role; all nodes of a run have the same.
        run_id: the run's id.
        max_restarts: how many failures the run may have.

    Raises:
        ValueError: the node is no member of the round.
    """
    group_rank = round.nodes.index(node)
    first = round.first_rank(node)
    workers = round.members[group_rank].workers
    host, _, port = round.store.rpartition(":")
    shared = {
        "GROUP_RANK": str(group_rank),
        "GROUP_WORLD_SIZE": str(len(round.members)),
        "LOCAL_WORLD_SIZE": str(workers),
        "WORLD_SIZE": str(round.world_size),
        "ROLE_NAME": role,
        "ROLE_WORLD_SIZE": str(round.world_size),
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_ROUND": str(round.number),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RESTART_COUNT": str(round.restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        # The round's store is served beside the workers, so that it outlives any one of them.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return [
        shared | {"LOCAL_RANK": str(local), "RANK": str(first + local), "ROLE_RANK": str(first + local)}
        for local in range(workers)
    ]
