"""The generated files and their contents."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from scripts.monitoring.alerts import GROUPS
from scripts.monitoring.fleet import FLEET_DASHBOARD
from scripts.monitoring.grafana import document
from scripts.monitoring.job import JOB_DASHBOARD
from scripts.monitoring.rules import rules_file

ROOT: Final = Path(__file__).resolve().parents[2]
DASHBOARDS: Final = ROOT / "charts" / "dashboards"
RULES: Final = ROOT / "charts" / "alerts" / "elasticjobs.yaml"


def files() -> dict[Path, str]:
    """Return the contents of the files, by path."""
    return {
        DASHBOARDS / "fleet.json": document(FLEET_DASHBOARD, job_uid=JOB_DASHBOARD.uid),
        DASHBOARDS / "job.json": document(JOB_DASHBOARD, job_uid=JOB_DASHBOARD.uid),
        RULES: rules_file(GROUPS),
    }
