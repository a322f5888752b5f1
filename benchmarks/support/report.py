"""The report of a benchmark: one JSON document, and a readable table.

With ``--json``, the document goes to standard output and the table to standard error; without ``--json``, only the
table is printed. The document::

    {
      "benchmark": "recovery",
      "machine": {"cores": 2, "memory_bytes": …, "cpu": …, "kernel": …, "python": …, "torch": …, "etcd": …,
                  "load_before": [1 min, 5 min, 15 min], "load_after": […]},
      "settings": {…},
      "measurements": [
        {"name": …, "includes": …, "unit": "s",
         "ours": {"samples": […], "median": …, "never": […]},
         "baseline": {"name": …, "samples": […], "median": …, "never": […]} or null,
         "ratio": baseline's median / ours' median, or null,
         "wanted": {"ours_at_most": …, "ratio_at_least": …}, "reached": true, false or null,
         "details": {…}}
      ],
      …the values of :meth:`Report.add_value`…
    }

If a value and a ratio are wanted, the value decides "reached"; if nothing is wanted, "reached" is null. An attempt that
did not finish is not a sample; "never" has the reason. If something is wanted and an attempt of "ours" did not finish,
"reached" is false.
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
    """The samples of one measurement.

    Attributes:
        name: the first column of the table.
        ours: the samples of this project, in the order in which they were taken.
        baseline: the baseline's samples; empty if there is no baseline.
        ours_never: the reason of each attempt of this project that did not finish.
        baseline_never: the reason of each attempt of the baseline that did not finish.
        baseline_name: the name of the baseline.
        unit: the unit of all samples; lower is better.
        includes: what the measured time includes.
        ours_at_most: the wanted limit of this project's median; None for none.
        ratio_at_least: the wanted ratio of the baseline's median to this project's; None for none.
        details: additional JSON values.
    """

    name: str
    ours: Sequence[float]
    baseline: Sequence[float] = ()
    ours_never: Sequence[str] = ()
    baseline_never: Sequence[str] = ()
    baseline_name: str = "torchrun"
    unit: str = "s"
    includes: str = ""
    ours_at_most: float | None = None
    ratio_at_least: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float | None:
        """The median of this project's samples; None if there are none."""
        return _median(self.ours)

    @property
    def ratio(self) -> float | None:
        """The baseline's median divided by this project's; None if a median is missing, or this project's is 0."""
        baseline = _median(self.baseline)
        return baseline / self.median if baseline is not None and self.median else None

    @property
    def reached(self) -> bool | None:
        """Whether the wanted values were reached; None if nothing is wanted, or a ratio without a baseline."""
        if self.ours_at_most is None and self.ratio_at_least is None:
            return None
        if self.median is None or self.ours_never:
            return False
        if self.ours_at_most is not None:
            return self.median <= self.ours_at_most
        return None if self.ratio is None or self.ratio_at_least is None else self.ratio >= self.ratio_at_least

    def as_json(self) -> dict[str, Any]:
        """Return the measurement as JSON values."""
        return {
            "name": self.name,
            "includes": self.includes,
            "unit": self.unit,
            "ours": summary(self.ours, self.ours_never),
            "baseline": (
                {"name": self.baseline_name, **summary(self.baseline, self.baseline_never)}
                if self.baseline or self.baseline_never
                else None
            ),
            "ratio": self.ratio,
            "wanted": {"ours_at_most": self.ours_at_most, "ratio_at_least": self.ratio_at_least},
            "reached": self.reached,
            "details": dict(self.details),
        }


class Report:
    """The results of one run of a benchmark.

    Args:
        benchmark: the benchmark's name.
        settings: the benchmark's settings, as JSON values.
        etcd: the etcd binary that the benchmark uses; None for none.
    """

    def __init__(self, benchmark: str, *, settings: Mapping[str, Any], etcd: Path | None = None) -> None:
        self._benchmark = benchmark
        self._settings = dict(settings)
        self._machine = _machine(etcd)
        self._measurements: list[Measurement] = []
        self._told: dict[str, Any] = {}

    def add(self, measurement: Measurement) -> None:
        """Append a measurement."""
        self._measurements.append(measurement)

    def add_value(self, name: str, value: Any) -> None:  # noqa: ANN401 - any JSON value
        """Add a JSON value to the top level of the document.

        A list of flat objects with equal keys is also printed as a table.
        """
        self._told[name] = value

    def as_json(self) -> dict[str, Any]:
        """Return the document."""
        return {
            "benchmark": self._benchmark,
            "machine": {**self._machine, "load_after": list(os.getloadavg())},
            "settings": self._settings,
            "measurements": [measurement.as_json() for measurement in self._measurements],
            **self._told,
        }

    def as_text(self) -> str:
        """Return the tables."""
        machine = self._machine
        facts = (
            f"{self._benchmark}: {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.1f} GiB, "
            f"Python {machine['python']}, torch {machine['torch']}, etcd {machine['etcd']}, "
            f"load {machine['load_before'][0]:.1f} before"
        )
        parts = [facts]
        if self._measurements:
            head = ("what", "ours", "from … to", "baseline", "baseline/ours", "wanted", "")
            parts.append(_table([head, *(_row(measurement) for measurement in self._measurements)]))
        for name, value in self._told.items():
            if _is_rows(value):
                cells = [[_cell(each) for each in row.values()] for row in value]
                parts.append(f"{name}\n{_table([list(value[0]), *cells])}")
        return "\n\n".join(parts)

    def show(self, *, as_json: bool) -> None:
        """Print the document to standard output and the tables to standard error, or only the tables."""
        if as_json:
            print(self.as_text(), file=sys.stderr, flush=True)
            print(json.dumps(self.as_json(), indent=2), flush=True)
        else:
            print(self.as_text(), flush=True)


def note(text: str) -> None:
    """Print the progress of a benchmark to standard error."""
    print(text, file=sys.stderr, flush=True)


def summary(samples: Sequence[float], never: Sequence[str]) -> dict[str, Any]:
    """Return samples, their median, and the reasons of the attempts that did not finish, as JSON values."""
    return {"samples": list(samples), "median": _median(samples), "never": list(never)}


def _machine(etcd: Path | None) -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cpu": _cpu(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _package_version("torch"),
        "etcd": _etcd_version(etcd) if etcd is not None else None,
        "load_before": list(os.getloadavg()),
    }


def _etcd_version(binary: Path) -> str | None:
    printed = subprocess.run(
        [str(binary), "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT, check=False
    )
    found = re.search(r"etcd Version: (\S+)", printed.stdout)
    return found.group(1) if found else None


def _table(rows: Sequence[Iterable[str]]) -> str:
    """Return rows as aligned columns; the first row is the header."""
    lines = [list(row) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _median(samples: Sequence[float]) -> float | None:
    return statistics.median(samples) if samples else None


def _row(measurement: Measurement) -> tuple[str, ...]:
    def formatted(value: float | None) -> str:
        if value is None:
            return "-"
        if measurement.unit != "s":
            return f"{value:.4g} {measurement.unit}"
        return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"

    def median(samples: Sequence[float], never: Sequence[str]) -> str:
        if not never:
            return formatted(_median(samples))
        return (
            f"{formatted(_median(samples))}, {len(never)} of {len(samples) + len(never)} never" if samples else "never"
        )

    ours = measurement.ours
    wanted = [
        *([f"≤ {formatted(measurement.ours_at_most)}"] if measurement.ours_at_most is not None else []),
        *([f"ratio ≥ {measurement.ratio_at_least:g}"] if measurement.ratio_at_least is not None else []),
    ]
    return (
        measurement.name,
        median(ours, measurement.ours_never),
        f"{formatted(min(ours))} … {formatted(max(ours))}" if ours else "-",
        median(measurement.baseline, measurement.baseline_never),
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
