"""What a dashboard is made of, as data: pages, rows, panels and queries; nothing of it knows Grafana's JSON."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Unit(enum.StrEnum):
    """What a value is measured in, as Grafana calls it."""

    NUMBER = "none"
    SECONDS = "s"
    SHARE = "percentunit"
    BYTES = "bytes"
    PER_SECOND = "ops"
    TIMES = "suffix: times"


class Needs(enum.StrEnum):
    """What has to be there besides agents, or instead of them, so that a query has an answer."""

    AGENTS = "agents"
    STEPS = "steps"
    """The program calls ``torchelastic.step``."""
    CHECKPOINTS = "checkpoints"
    """The program writes in ``torchelastic.checkpoint``."""
    OWN_METRICS = "own metrics"
    """The program measures something of its own."""
    GPU = "gpu"
    OPERATOR = "operator"


class Look(enum.Enum):
    """How values are shown."""

    NUMBER = enum.auto()
    LINES = enum.auto()
    STEPS = enum.auto()
    """Lines of what jumps from one value to the next."""
    STACK = enum.auto()
    TIMELINE = enum.auto()
    """When what is 1 held, and when it was 0."""
    BARS = enum.auto()
    """One bar for each series, of its last value."""
    TABLE = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Query:
    """A question in PromQL.

    Attributes:
        expr: the question; Grafana fills in what begins with a $.
        legend: the name of each series, of its labels; in a table, the title of the column.
        needs: without what it has no answer.
    """

    expr: str
    legend: str = ""
    needs: Needs = Needs.AGENTS


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture.

    Attributes:
        title: of the picture.
        about: what it says, and what to look for; in sentences.
        unit: of its values.
        queries: what is shown.
        look: how.
        width: in columns, of which a page has 24.
        decimals: after the point; None: as many as fit.
        repeat: the variable for each value of which the panel is there once.
        good: the value from which on a number is green, below which it is yellow; None for no colours.
        bad: the value from which on it is red, where more is worse.
        units: of columns of a table that have another one, by their titles.
    """

    title: str
    about: str
    unit: Unit
    queries: tuple[Query, ...]
    look: Look = Look.LINES
    width: int = 8
    decimals: int | None = None
    repeat: str = ""
    good: float | None = None
    bad: float | None = None
    units: tuple[tuple[str, Unit], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """Panels that belong together.

    Attributes:
        title: what they are about.
        panels: from left to right and on.
    """

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """What can be chosen at the top of a page, beside the data source.

    Attributes:
        name: as queries use it.
        label: as people see it.
        values: the query that gives what can be chosen; empty where it is typed.
        regex: what of each answer counts: the first group.
        many: whether several can be chosen, and all of them.
        about: what it is for.
    """

    name: str
    label: str
    about: str
    values: str = ""
    regex: str = ""
    many: bool = False


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened, as a line over all pictures.

    Attributes:
        name: what happened.
        query: answers at the moments at which it did.
        colour: of the line.
    """

    name: str
    query: Query
    colour: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """A dashboard.

    Attributes:
        uid: its address.
        title: its name.
        about: what it is for.
        variables: what can be chosen.
        marks: what happened.
        rows: its panels.
        since: how far back it looks at first.
    """

    uid: str
    title: str
    about: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
    marks: tuple[Mark, ...] = ()
    since: str = "now-6h"

    @property
    def panels(self) -> Iterator[Panel]:
        """All panels."""
        for row in self.rows:
            yield from row.panels
