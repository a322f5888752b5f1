"""The queries of dashboards and alerts with their variables filled in, and checks of the answers."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

from scripts.monitoring.dashboard import Unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from scripts.monitoring.dashboard import Dashboard, Panel, Query
    from tests.support.prometheus import Answer

PROGRAM: Final = """\
import os, sys, time
from pathlib import Path

import torchelastic
from torchelastic import metrics

folder = Path(sys.argv[1])
metrics.declare("my_app", counters=["samples"], histograms={"batch.ms": [0.001, 0.01, 0.1]})
stream = metrics.getStream("my_app")
(folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
for step in range(1_000_000):
    if (folder / "finish").exists():
        break
    torchelastic.step()
    stream.add_value("train.loss", 1 / (step + 1))
    stream.add_value("samples", 64)
    stream.add_value("batch.ms", 5)
    time.sleep(0.1)
    if step % 10 == 9:
        with torchelastic.report_checkpoint():
            time.sleep(0.02)
"""
"""A program with steps of a tenth of a second, and a checkpoint after every tenth step."""
OWN: Final = {
    "gauge": "my_app_train_loss",
    "counter": "my_app_samples_total",
    "histogram": "my_app_batch_seconds",
    "group": "",
}
"""The metrics of the program that are selected in the variables of a dashboard."""
IN_GRAFANA: Final = {"__rate_interval": "10s", "__range": "10m", "__interval": "1s"}
"""The values of Grafana's variables for metrics that are scraped twice a second."""

_VARIABLE: Final = re.compile(r"\$\{(\w+)\}|\$(\w+)")


def filled_in(expr: str, values: Mapping[str, str]) -> str:
    """Return the query as Grafana sends it.

    Raises:
        KeyError: the query has an unknown variable.
    """
    known = {**IN_GRAFANA, **values}
    return _VARIABLE.sub(lambda found: known[found[1] or found[2]], expr)


def queries(dashboard: Dashboard) -> Iterator[tuple[Panel, Query]]:
    """Yield all queries of a dashboard, each with its panel."""
    for panel in dashboard.panels:
        for query in panel.queries:
            yield panel, query


def unit_of(panel: Panel, query: Query) -> Unit:
    """Return the unit of the answers of a query."""
    return dict(panel.units).get(query.legend, panel.unit)


_LEAST: Final = {Unit.BYTES: 1e6, Unit.TIMES: 1.0}
_MOST: Final = {Unit.SHARE: 1.0, Unit.BYTES: 1e11, Unit.NUMBER: 1e5, Unit.PER_SECOND: 1e5, Unit.TIMES: 1e3}


def complaints(answer: Answer, unit: Unit, *, age: float) -> Iterator[str]:
    """Yield a sentence for each value that is impossible for the unit of an answer.

    Args:
        answer: the answer to one query.
        unit: the unit of the answer.
        age: seconds since the job was created; no duration is longer.
    """
    if not answer:
        yield "no answer"
    least, most = _LEAST.get(unit, 0.0), _MOST.get(unit, age)
    for sample in answer:
        if not math.isfinite(sample.value) or not least <= sample.value <= most * 1.001:
            yield f"{sample.value:g} of {dict(sample.labels)} is not between {least:g} and {most:g} ({unit.name})"


def names_in(exprs: Iterable[str]) -> set[str]:
    """Return the names of all series in queries."""
    found = {name for expr in exprs for name in re.findall(r"\b((?:torchelastic|elastic_operator|process)_\w+)", expr)}
    return {name for name in found if not name.endswith("_")}
