"""A dashboard as data: rows, panels and queries, independent of Grafana's JSON."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Unit(enum.StrEnum):
    """The units of values; each value is Grafana's name of the unit."""

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
    """Lines that change in steps."""
    STACK = enum.auto()
    TIMELINE = enum.auto()
    """Bars that show when a value was 1 and when 0."""
    BARS = enum.auto()
    """One bar for the last value of each series."""
    TABLE = enum.auto()


@dataclass(frozen=True)
class Query:
    """A PromQL query.

    Attributes:
        expr: the query; Grafana replaces names that begin with a $.
        legend: the name of each series, from its labels; in a table, the title of the column.
        needs: what must exist so that the query has a result.
    """

    expr: str
    legend: str = ""
    needs: Needs = Needs.AGENTS


@dataclass(frozen=True)
class Display:
    """How a panel shows its values.

    Attributes:
        title: the title.
        unit: the unit of the values.
        look: the kind of panel.
        width: the width in columns; a dashboard has 24.
        decimals: the number of decimals; None for as many as fit.
        repeat: the name of a variable, for each of whose values the panel is repeated; empty for none.
        good: the threshold from which a number is green; below it, the number is orange; None for no colors.
        bad: the threshold from which a number is orange, if higher is worse; None for no colors.
        units: pairs of a table column's title and its unit, for columns with another unit.
    """

    title: str
    unit: Unit
    look: Look = Look.LINES
    width: int = 8
    decimals: int | None = None
    repeat: str = ""
    good: float | None = None
    bad: float | None = None
    units: tuple[tuple[str, Unit], ...] = ()

    def show(self, about: str, *queries: Query) -> Panel:
        """Return the panel with this description and the results of these queries."""
        return Panel(**vars(self), about=about, queries=queries)


@dataclass(frozen=True, kw_only=True)
class Panel(Display):
    """One panel.

    Attributes:
        about: the description, in sentences.
        queries: the queries whose results the panel shows.
    """

    about: str
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Row:
    """Panels that belong together.

    Attributes:
        title: the title.
        panels: the panels, in reading order.
    """

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A selection at the top of a dashboard, in addition to the data source.

    Attributes:
        name: the name in queries.
        label: the displayed name.
        values: the query for the possible values; empty for free text.
        regex: a regular expression whose first group selects the value from each result.
        many: whether several or all values can be selected.
        about: the description.
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
        name: the name of the event.
        query: the query that has results at the times of the event.
        color: the color of the line.
    """

    name: str
    query: Query
    color: str


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """A dashboard.

    Attributes:
        uid: the dashboard's id in URLs.
        title: the title.
        about: the description.
        variables: the selections at the top.
        marks: the events that are marked in all panels.
        rows: the rows of panels.
        since: the beginning of the default time range.
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
        """All panels, in reading order."""
        for row in self.rows:
            yield from row.panels
