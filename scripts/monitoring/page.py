"""The parts of a dashboard as data: pages, rows, panels and queries, independent of Grafana's JSON."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Unit(enum.StrEnum):
    """Units, by Grafana's names."""

    NUMBER = "none"
    SECONDS = "s"
    SHARE = "percentunit"
    BYTES = "bytes"
    PER_SECOND = "ops"
    TIMES = "suffix: times"


class Needs(enum.StrEnum):
    """What must exist so that a query has a result."""

    AGENTS = "agents"
    STEPS = "steps"
    """The program calls ``torchelastic.step``."""
    CHECKPOINTS = "checkpoints"
    """The program writes in ``torchelastic.checkpoint``."""
    OWN_METRICS = "own metrics"
    """The program has its own metrics."""
    GPU = "gpu"
    OPERATOR = "operator"


class Look(enum.Enum):
    """The kinds of panels."""

    NUMBER = enum.auto()
    LINES = enum.auto()
    STEPS = enum.auto()
    """Lines with steps."""
    STACK = enum.auto()
    TIMELINE = enum.auto()
    """The times at which a value was 1 and 0."""
    BARS = enum.auto()
    """One bar for the last value of each series."""
    TABLE = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Query:
    """A PromQL query.

    Attributes:
        expr: the query; Grafana replaces names that begin with a $.
        legend: the name of each series, from its labels; in a table, the title of the column.
        needs: what must exist so that it has a result.
    """

    expr: str
    legend: str = ""
    needs: Needs = Needs.AGENTS


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        title: its title.
        about: its description, in sentences.
        unit: the unit of its values.
        queries: the queries that it shows.
        look: its kind.
        width: the width in columns; a page has 24.
        decimals: the number of decimals; None for as many as fit.
        repeat: a variable; the panel is repeated for each of its values.
        good: the threshold from which a number is green; below it, the number is orange; None for no colours.
        bad: the threshold from which a number is orange, if higher is worse.
        units: the units of a table's columns that have their own, by title.
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
        title: its title.
        panels: in reading order.
    """

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A selection at the top of a page, in addition to the data source.

    Attributes:
        name: its name in queries.
        label: its displayed name.
        values: the query for its values; empty for free text.
        regex: a regular expression whose first group selects the value from each result.
        many: whether several or all values can be selected.
        about: its description.
    """

    name: str
    label: str
    about: str
    values: str = ""
    regex: str = ""
    many: bool = False


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event, as a vertical line in all panels.

    Attributes:
        name: the event.
        query: has results at the times of the event.
        colour: the colour of the line.
    """

    name: str
    query: Query
    colour: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """A dashboard.

    Attributes:
        uid: its id in URLs.
        title: its name.
        about: its description.
        variables: its selections.
        marks: the events that it marks.
        rows: its panels.
        since: the beginning of its default time range.
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
