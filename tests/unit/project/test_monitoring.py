"""The chart's dashboards and alerts: generated files, queried series, links and runbooks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from scripts.monitoring.alerts import GROUPS, Alert
from scripts.monitoring.files import DASHBOARDS, RULES, files
from scripts.monitoring.fleet import FLEET_DASHBOARD
from scripts.monitoring.job import JOB_DASHBOARD, MARKS
from tests.support.monitored import names_in, queries

if TYPE_CHECKING:
    from scripts.monitoring.dashboard import Dashboard

ROOT = Path(__file__).parents[3]
BOTH = (FLEET_DASHBOARD, JOB_DASHBOARD)
ALERTS = [alert for alerts in GROUPS.values() for alert in alerts]


def document(dashboard: Dashboard) -> dict[str, Any]:
    """Return the generated file of a dashboard."""
    found = [json.loads(path.read_text()) for path in DASHBOARDS.iterdir()]
    [made] = [each for each in found if each["uid"] == dashboard.uid]
    return dict(made)


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_the_files_in_the_chart_are_up_to_date(path: Path) -> None:
    assert path.read_text() == files()[path], "run `python -m scripts.monitoring`"
    assert {*DASHBOARDS.iterdir(), *RULES.parent.iterdir()} == files().keys()


@pytest.mark.parametrize("dashboard", BOTH, ids=lambda dashboard: dashboard.title)
def test_a_dashboard_has_all_panels_without_overlap(dashboard: Dashboard) -> None:
    panels = [panel for panel in document(dashboard)["panels"] if panel["type"] != "row"]
    assert len(panels) == len([*dashboard.panels])
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


def documented() -> set[str]:
    """Return the names of all documented series."""
    found = set()
    for page in ("metrics.md", "cluster.md"):
        for row in re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / page).read_text(), re.MULTILINE):
            names = re.findall(r"`(\w+)", row)
            whole = [name for name in names if not name.startswith("_")]
            found |= {*whole, *(re.sub(r"(_job)_.*", r"\1", whole[0]) + name for name in names if name.startswith("_"))}
    return found


def test_dashboards_and_alerts_query_documented_series() -> None:
    asked = names_in(
        [
            *(query.expr for dashboard in BOTH for _, query in queries(dashboard)),
            *(mark.query.expr for mark in MARKS),
            *(alert.expr for alert in ALERTS),
        ]
    )
    assert len(asked) > 30
    known = documented()
    assert {name for name in asked if not {name, re.sub(r"_(bucket|sum|count)$", "", name)} & known} == set()


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_has_a_runbook(alert: Alert) -> None:
    page = (ROOT / "docs" / "runbooks" / f"{alert.name}.md").read_text()
    assert page.startswith(f"# {alert.name}\n\nSeverity: {alert.severity}. ")
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == ["What it means", "Diagnosis", "What to do"]
    assert not re.findall(r"^(?:kubectl|elasticjob|curl) .*", page, re.MULTILINE), "commands are indented"
    for link in re.findall(r"\]\((?!http)([^)#]+)", page):
        assert (ROOT / "docs" / "runbooks" / link).is_file(), link
    for title in re.findall(r"\*([A-Z][A-Za-z ]+)\*", page.replace("**", "")):
        shown = {panel.title for each in BOTH for panel in each.panels} | {
            row.title for each in BOTH for row in each.rows
        }
        assert title in {*shown, "ElasticJobs: fleet"} or title.startswith("Status"), title


def test_the_page_on_monitoring_lists_every_alert_and_is_linked() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\((runbooks/\w+\.md)\) \| (\w+) \| .+ \|$", page, re.MULTILINE)
    assert rows == [(alert.name, f"runbooks/{alert.name}.md", alert.severity) for alert in ALERTS]
    assert {path.stem for path in (ROOT / "docs" / "runbooks").iterdir()} == {alert.name for alert in ALERTS}
    assert "](docs/monitoring.md)" in (ROOT / "README.md").read_text()
    assert "](monitoring.md)" in (ROOT / "docs" / "cluster.md").read_text()
