"""The file of alerting rules, for Prometheus itself and for the chart's PrometheusRule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from scripts.monitoring.alerts import RUNBOOKS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from scripts.monitoring.alerts import Alert

HEADER = """\
# Alerts on elastic jobs and their operator, for Prometheus' own rule_files; the chart makes a PrometheusRule of it
# (monitoring.rules.enabled). docs/runbooks has a page on each. Made by `python -m scripts.monitoring`.
"""


def rules_file(groups: Mapping[str, Sequence[Alert]]) -> str:
    """The file."""
    made = {"groups": [{"name": name, "rules": [_rule(alert) for alert in alerts]} for name, alerts in groups.items()]}
    return HEADER + yaml.safe_dump(made, sort_keys=False, width=120)


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.lasting,
        "labels": {"severity": alert.severity.value},
        "annotations": {
            "summary": alert.summary,
            "description": alert.about,
            "runbook_url": f"{RUNBOOKS}/{alert.name}.md",
        },
    }
