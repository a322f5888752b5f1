"""How an agent comes to its peers: the store where they meet, and what it says of itself there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.contract import NodeRecord

if TYPE_CHECKING:
    from torchelastic.metrics.agent import AgentMetrics
    from torchelastic.settings import AgentSettings
    from torchelastic.store.api import Store


def introduction(settings: AgentSettings, metrics_port: int) -> NodeRecord:
    """What an agent says of itself.

    Args:
        settings: of the agent.
        metrics_port: on which it serves /metrics; 0 for none.
    """
    return NodeRecord(
        name=settings.node_name,
        address=settings.address,
        workers=settings.workers,
        size=settings.rendezvous.size,
        metrics=metrics_port,
        place=settings.place,
    )


async def connected(settings: AgentSettings, metrics: AgentMetrics) -> Store:
    """The store, connected to; how fast it answers is told.

    What it takes is imported here: a run without a store has no use for its HTTP client.

    Args:
        settings: of the agent.
        metrics: are told.

    Raises:
        StoreError: it cannot be reached in time, or refuses.
    """
    if settings.store is None:
        from torchelastic.store import MemoryStore

        return MemoryStore()
    from torchelastic.store.connecting import connect_within
    from torchelastic.store.measured import MeasuredStore

    store = await connect_within(settings.store, settings.rendezvous.join_timeout)
    return MeasuredStore(store, metrics.store_answered)
