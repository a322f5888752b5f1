"""What the API server lists, a page at a time: its objects are decoded one by one, as they are looked at.

Decoded, an object takes many times the memory of its text, most of it for notes about who manages which field. Little
of that is kept: a page decoded as a whole would decide how much memory the operator takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_operator.spec import Json


class _About(msgspec.Struct, frozen=True):
    version: str = msgspec.field(name="resourceVersion")
    after: str = msgspec.field(name="continue", default="")


class _Listing(msgspec.Struct, frozen=True):
    about: _About = msgspec.field(name="metadata")
    items: tuple[msgspec.Raw, ...] | None


_DECODER: Final = msgspec.json.Decoder(_Listing)


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a listing; a loop over it gives the objects, each as it was written.

    Attributes:
        version: the resource version of the listing, the same for all of its pages.
        after: what the next page is asked for with; empty where this is the last one.
    """

    version: str
    after: str
    _bodies: tuple[msgspec.Raw, ...]

    @classmethod
    def of(cls, text: bytes) -> Page:
        """Read the frame of a page, and leave its objects for later.

        Raises:
            ValueError: it is none.
        """
        read = _DECODER.decode(text)
        return cls(read.about.version, read.about.after, read.items or ())

    def __iter__(self) -> Iterator[Json]:
        for body in self._bodies:
            found: Json = msgspec.json.decode(body)
            yield found
