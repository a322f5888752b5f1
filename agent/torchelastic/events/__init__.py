"""Events of a run, and where they go: torch's, under torchelastic's name.

torch is imported when one of the names is first used. Our agent tells what happens in its log, in its metrics and in
the store; it records no events of this kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.torchs import names_of

if TYPE_CHECKING:
    from torch.distributed.elastic.events import construct_and_record_rdzv_event, record, record_rdzv_event
    from torch.distributed.elastic.events.api import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent
    from torch.distributed.elastic.events.handlers import get_logging_handler

__all__ = [
    "Event",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "RdzvEvent",
    "construct_and_record_rdzv_event",
    "get_logging_handler",
    "record",
    "record_rdzv_event",
]

__getattr__ = names_of("torch.distributed.elastic.events", __name__, __all__)
