"""torch's events, and torchelastic's handlers for them. The agent of torchelastic records no such events.

A handler receives the events of one type. The type of an event is its ``source`` if that is a text, and otherwise
"torchelastic".
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Final

from torch.distributed.elastic import events
from torch.distributed.elastic.events import construct_and_record_rdzv_event, record_rdzv_event
from torch.distributed.elastic.events.api import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent
from torch.distributed.elastic.events.handlers import get_logging_handler

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ConsoleEventHandler",
    "Event",
    "EventHandler",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "NullEventHandler",
    "RdzvEvent",
    "configure",
    "construct_and_record_rdzv_event",
    "get_logging_handler",
    "record",
    "record_event",
    "record_rdzv_event",
]

_PLATFORM: Final = "torchelastic"


class EventHandler(abc.ABC):
    """Receives events."""

    @abc.abstractmethod
    def record(self, event: Event) -> None:
        """Handle one event."""


class NullEventHandler(EventHandler):
    """Drops events."""

    def record(self, event: Event) -> None:
        """Do nothing."""


class ConsoleEventHandler(EventHandler):
    """Prints each event as JSON."""

    def record(self, event: Event) -> None:
        """Print one line to the standard output."""
        print(event, flush=True)  # noqa: T201 - output for the user


_handlers: dict[str, EventHandler] = {}


def configure(handler: EventHandler, event_type: str = _PLATFORM) -> None:
    """Set the handler of all events of a type."""
    _handlers[event_type] = handler


def record_event(event: Event) -> None:
    """Pass an event to the handler of its type."""
    source: str = event.source
    event_type = _PLATFORM if isinstance(source, EventSource) else source
    _handlers.get(event_type, NullEventHandler()).record(event)


def record(
    event: Event | str, destination: str = "null", metadata: Mapping[str, EventMetadataValue] | None = None
) -> None:
    """Record an event.

    Args:
        event: the event, or its name.
        destination: the name of one of torch's logging handlers; with a name of an event, the type of the event.
        metadata: with a name of an event, additional data.
    """
    if isinstance(event, str):
        event_type = _PLATFORM if destination == "null" else destination
        record_event(Event(event, event_type, metadata=dict(metadata or {})))  # type: ignore[arg-type] # a type's name
    else:
        events.record(event, destination)
        record_event(event)
