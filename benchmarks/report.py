"""How a benchmark tells what it measured: one JSON document, and the same as a plain table for people.

A benchmark makes one :class:`Report`, adds :class:`Measurement` objects in the order in which they are to be read, and
calls :meth:`Report.show` at the end::

    report = Report("recovery", settings={"repeats": 5}, etcd=Path("/usr/bin/etcd"))
    report.add(
        Measurement(
            "worker killed",
            ours=(0.11, 0.12, 0.10),
            peer=(3.9, 4.0, 3.8),
            peer_name="torchrun",
            ours_at_most=0.15,
            ratio_at_least=25,
            includes="from SIGKILL until both workers are past an all-reduce",
        )
    )
    report.tell("processes", {"left over": 0})
    report.show(as_json=arguments.json)

With ``--json`` the document goes to standard output and the table to standard error, so that a pipe gets JSON alone;
without it the table goes to standard output. The document::

    {
      "benchmark": "recovery",
      "machine": {"cores": 2, "memory_bytes": …, "cpu": …, "kernel": …, "python": …, "torch": …, "etcd": …,
                  "load_before": [1 min, 5 min, 15 min], "load_after": […]},
      "settings": {…},
      "measurements": [
        {"name": …, "includes": …, "unit": "s",
         "ours": {"samples": […], "median": …, "never": […]},
         "peer": {"name": …, "samples": […], "median": …, "never": […]} or null,
         "ratio": peer's median / our median, or null,
         "wanted": {"ours_at_most": …, "ratio_at_least": …}, "reached": true, false or null,
         "details": {…}}
      ],
      …whatever :meth:`Report.tell` was given…
    }

Where a figure and a ratio are wanted both, the figure decides whether it was reached; where nothing is wanted,
``reached`` is null. What never came to its end is no sample, but told with its reason under "never"; where that befell
us, nothing that is wanted was reached.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_VERSION_TIMEOUT: Final = 10.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One thing that was measured again and again, by us and, where there is one, by a peer.

    Attributes:
        name: what it is, in a few words; the first column of the table.
        ours: our samples, in the order in which they were taken.
        peer: the peer's samples; empty where there is no peer.
        ours_never: why there was no end to it, for each time that there was none; then it is no sample.
        peer_never: the same of the peer.
        peer_name: who the peer is.
        unit: of all samples; less is better.
        includes: what lies between the start and the end of the clock, in words.
        ours_at_most: our median should not be larger; None where no figure is wanted.
        ratio_at_least: the peer's median over ours should not be smaller; None where no ratio is wanted.
        details: more that belongs to it, as JSON can say it.
    """

    name: str
    ours: Sequence[float]
    peer: Sequence[float] = ()
    ours_never: Sequence[str] = ()
    peer_never: Sequence[str] = ()
    peer_name: str = "torchrun"
    unit: str = "s"
    includes: str = ""
    ours_at_most: float | None = None
    ratio_at_least: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float | None:
        """The median of our samples; None where there are none."""
        return _median(self.ours)

    @property
    def peer_median(self) -> float | None:
        """The median of the peer's samples; None where there are none."""
        return _median(self.peer)

    @property
    def ratio(self) -> float | None:
        """How many times the peer's median is ours; None where one of them is not there, or nothing to divide by."""
        return self.peer_median / self.median if self.peer_median is not None and self.median else None

    @property
    def reached(self) -> bool | None:
        """Whether what is wanted was reached; None where nothing is wanted, or it takes a peer and there is none."""
        if self.ours_at_most is None and self.ratio_at_least is None:
            return None
        if self.median is None or self.ours_never:
            return False
        if self.ours_at_most is not None:
            return self.median <= self.ours_at_most
        return None if self.ratio is None or self.ratio_at_least is None else self.ratio >= self.ratio_at_least

    def as_json(self) -> dict[str, Any]:
        """The measurement as the document has it."""
        return {
            "name": self.name,
            "includes": self.includes,
            "unit": self.unit,
            "ours": _told(self.ours, self.ours_never),
            "peer": (
                {"name": self.peer_name, **_told(self.peer, self.peer_never)} if self.peer or self.peer_never else None
            ),
            "ratio": self.ratio,
            "wanted": {"ours_at_most": self.ours_at_most, "ratio_at_least": self.ratio_at_least},
            "reached": self.reached,
            "details": dict(self.details),
        }


class Report:
    """What one run of a benchmark has shown.

    Args:
        benchmark: its name.
        settings: with what it was run; as JSON can say it.
        etcd: the etcd that it used; None where it used none.
    """

    def __init__(self, benchmark: str, *, settings: Mapping[str, Any], etcd: Path | None = None) -> None:
        self._benchmark = benchmark
        self._settings = dict(settings)
        self._machine = machine_facts(etcd)
        self._measurements: list[Measurement] = []
        self._told: dict[str, Any] = {}

    def add(self, measurement: Measurement) -> None:
        """Take in a measurement."""
        self._measurements.append(measurement)

    def tell(self, name: str, value: Any) -> None:  # noqa: ANN401 - whatever JSON can say
        """Put something else at the top of the document: a profile, counts of operations.

        A list of flat objects with equal keys becomes a table of its own; anything else stands in the document alone.
        """
        self._told[name] = value

    def as_json(self) -> dict[str, Any]:
        """The whole document."""
        return {
            "benchmark": self._benchmark,
            "machine": {**self._machine, "load_after": list(os.getloadavg())},
            "settings": self._settings,
            "measurements": [measurement.as_json() for measurement in self._measurements],
            **self._told,
        }

    def as_text(self) -> str:
        """The measurements as a table, and what else was told in rows as tables below it."""
        parts = [f"{self._benchmark}: {self._facts()}"]
        if self._measurements:
            head = ("what", "ours", "from … to", "peer", "peer/ours", "wanted", "")
            parts.append(table([head, *(_row(measurement) for measurement in self._measurements)]))
        for name, value in self._told.items():
            if _is_rows(value):
                cells = [[_cell(each) for each in row.values()] for row in value]
                parts.append(f"{name}\n{table([list(value[0]), *cells])}")
        return "\n\n".join(parts)

    def show(self, *, as_json: bool) -> None:
        """Print the document to standard output and the table to standard error, or the table alone."""
        if as_json:
            print(self.as_text(), file=sys.stderr, flush=True)
            print(json.dumps(self.as_json(), indent=2), flush=True)
        else:
            print(self.as_text(), flush=True)

    def _facts(self) -> str:
        facts = self._machine
        gibibytes = facts["memory_bytes"] / 2**30
        return (
            f"{facts['cores']} cores, {gibibytes:.1f} GiB, Python {facts['python']}, torch {facts['torch']}, "
            f"etcd {facts['etcd']}, load {facts['load_before'][0]:.1f} before"
        )


def machine_facts(etcd: Path | None = None) -> dict[str, Any]:
    """What a reader has to know of the machine to make something of the figures."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cpu": _cpu(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _package_version("torch"),
        "etcd": etcd_version(etcd) if etcd is not None else None,
        "load_before": list(os.getloadavg()),
    }


def etcd_version(binary: Path) -> str | None:
    """The version that an etcd gives itself; None where it gives none."""
    said = subprocess.run(
        [str(binary), "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT, check=False
    )
    found = re.search(r"etcd Version: (\S+)", said.stdout)
    return found.group(1) if found else None


def seconds(value: float) -> str:
    """A time as people read it: "12.3 ms", "1.23 s"."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def table(rows: Sequence[Iterable[str]]) -> str:
    """Rows as aligned columns, the first one being the head."""
    lines = [list(row) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _median(samples: Sequence[float]) -> float | None:
    return statistics.median(samples) if samples else None


def _told(samples: Sequence[float], never: Sequence[str]) -> dict[str, Any]:
    return {"samples": list(samples), "median": _median(samples), "never": list(never)}


def _row(measurement: Measurement) -> tuple[str, ...]:
    def told(value: float | None) -> str:
        if value is None:
            return "-"
        return seconds(value) if measurement.unit == "s" else f"{value:.4g} {measurement.unit}"

    def median(samples: Sequence[float], never: Sequence[str]) -> str:
        if not never:
            return told(_median(samples))
        return f"{told(_median(samples))}, {len(never)} of {len(samples) + len(never)} never" if samples else "never"

    ours = measurement.ours
    wanted = [
        *([f"≤ {told(measurement.ours_at_most)}"] if measurement.ours_at_most is not None else []),
        *([f"ratio ≥ {measurement.ratio_at_least:g}"] if measurement.ratio_at_least is not None else []),
    ]
    return (
        measurement.name,
        median(ours, measurement.ours_never),
        f"{told(min(ours))} … {told(max(ours))}" if ours else "-",
        median(measurement.peer, measurement.peer_never),
        "-" if measurement.ratio is None else f"{measurement.ratio:.3g}",
        ", ".join(wanted) or "-",
        {True: "reached", False: "NOT REACHED", None: ""}[measurement.reached],
    )


def _is_rows(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, dict) and list(row) == list(value[0]) for row in value)
        and not any(isinstance(cell, (list, dict)) for row in value for cell in row.values())
    )


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _cpu() -> str | None:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return found.group(1) if found else None


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
