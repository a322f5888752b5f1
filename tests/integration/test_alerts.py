"""Each alert, evaluated by promtool, fires only when it should and links to an existing runbook."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from scripts.monitoring.alerts import GROUPS
from scripts.monitoring.files import RULES
from tests.support.prometheus import promtool

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from scripts.monitoring.alerts import Alert

pytestmark = [pytest.mark.integration, pytest.mark.prometheus]

ALERTS = {alert.name: alert for alerts in GROUPS.values() for alert in alerts}
WHOSE = 'job_namespace="team",elasticjob="digits"'
OF_THE_JOB = {"job_namespace": "team", "elasticjob": "digits"}
HEALTHY = {
    "elastic_operator_queue_depth": "0x200",
    "elastic_operator_leader": "1x200",
    "elastic_operator_elasticjobs": "1x200",
    'elastic_operator_reconciles_total{result="success"}': "0+1x200",
    'elastic_operator_reconciles_total{result="error"}': "0x200",
    'elastic_operator_reconciles_total{result="panic"}': "0x200",
    f"elastic_operator_job_desired_pods{{{WHOSE}}}": "2x200",
    f"elastic_operator_job_ready_pods{{{WHOSE}}}": "2x200",
    f"elastic_operator_job_min_pods{{{WHOSE}}}": "1x200",
    f"elastic_operator_job_max_restarts{{{WHOSE}}}": "10x200",
    f"elastic_operator_job_backoff_limit{{{WHOSE}}}": "6x200",
    **{
        f'elastic_operator_job_restarts_total{{{WHOSE},cause="{cause}"}}': "0x200"
        for cause in ("worker_failed", "uncharged", "pod_failed")
    },
    **{
        f'elastic_operator_job_condition{{{WHOSE},condition="{condition}"}}': value
        for condition, value in {
            "Running": "1x200",
            "Suspended": "0x200",
            "Finished": "0x200",
            "Invalid": "0x200",
            "StoreUnreachable": "0x200",
        }.items()
    },
    f"elastic_operator_job_etcd_certificate_expiry_timestamp_seconds{{{WHOSE}}}": "2000000000x200",
    f"torchelastic_round{{{WHOSE}}}": "1x200",
    f"torchelastic_world_size{{{WHOSE}}}": "4x200",
    f'torchelastic_job_seconds_total{{{WHOSE},state="training"}}': "0+60x200",
    f'torchelastic_job_seconds_total{{{WHOSE},state="waiting"}}': "30x200",
    f'torchelastic_operation_duration_seconds_count{{{WHOSE},operation="train_step",rank="0"}}': "0+50x200",
    f'torchelastic_operation_duration_seconds_sum{{{WHOSE},operation="train_step",rank="0"}}': "0+55x200",
}
"""The series of one training job and of its operator, minute by minute."""


def condition(name: str, value: str) -> dict[str, str]:
    """Return a condition of the job."""
    return {f'elastic_operator_job_condition{{{WHOSE},condition="{name}"}}': value}


def restarts(value: str, cause: str = "worker_failed", instance: str = "") -> dict[str, str]:
    """Return the restarts of the job, as one replica of the operator exposes them."""
    copy = f',instance="{instance}"' if instance else ""
    return {f'elastic_operator_job_restarts_total{{{WHOSE},cause="{cause}"{copy}}}': value}


def trained(value: str, instance: str = "") -> dict[str, str]:
    """Return the training time of the job, as one agent exposes it."""
    agent = f',instance="{instance}"' if instance else ""
    return {f'torchelastic_job_seconds_total{{{WHOSE},state="training"{agent}}}': value}


def reconciled(**results: str) -> dict[str, str]:
    """Return the results of the operator's reconciles."""
    return {f'elastic_operator_reconciles_total{{result="{result}"}}': values for result, values in results.items()}


READY = f"elastic_operator_job_ready_pods{{{WHOSE}}}"
DESIRED = f"elastic_operator_job_desired_pods{{{WHOSE}}}"
STEPS = f'torchelastic_operation_duration_seconds_count{{{WHOSE},operation="train_step",rank="0"}}'
STEPPING = f'torchelastic_operation_duration_seconds_sum{{{WHOSE},operation="train_step",rank="0"}}'
EXPIRY = f"elastic_operator_job_etcd_certificate_expiry_timestamp_seconds{{{WHOSE}}}"
NONE = "_x200"


@dataclass(frozen=True)
class Scenario:
    """The series of a job, and the minutes at which an alert must fire or must not fire.

    Attributes:
        name: a description of the scenario.
        series: the series that differ from those of a healthy job.
        quiet: minutes at which the alert must not fire.
        fires: minutes at which the alert must fire.
        about: the labels of the firing alert.
        value: the value in the description of the alert, if it has one.
    """

    name: str
    series: Mapping[str, str]
    quiet: tuple[int, ...] = ()
    fires: tuple[int, ...] = ()
    about: Mapping[str, str] = field(default_factory=lambda: OF_THE_JOB)
    value: str = ""


SCENARIOS = {
    "ElasticJobBelowMinimum": [
        Scenario("all pods are lost and not replaced", {READY: "2x9 0x190"}, quiet=(9, 15), fires=(25, 60), value="0"),
        Scenario("pods are missing for five minutes", {READY: "2x9 0x4 2x180"}, quiet=(9, 12, 15, 25, 60)),
        Scenario("the job is suspended", {READY: "0x200"} | condition("Suspended", "1x200"), quiet=(25, 60)),
        Scenario(
            "the job is being suspended, and saving takes a long time",
            {READY: "2x9 0x190", DESIRED: "2x8 0x190"},
            quiet=(9, 15, 25, 60),
        ),
        Scenario("the job has finished", {READY: "0x200"} | condition("Finished", "1x200"), quiet=(25, 60)),
    ],
    "ElasticJobRestartStorm": [
        Scenario(
            "workers fail every two minutes",
            restarts("0x30 1 1 2 2 3 3 4 4 5 5 6 6 7x150"),
            quiet=(30, 36),
            fires=(43,),
            value="7",
        ),
        Scenario(
            "another operator replica takes over during the restarts",
            restarts("0x30 1 1 2 2 3 3 _x200", instance="a")
            | restarts("_x37 4 4 5 5 6 6 6x150", instance="b")
            | restarts(NONE),
            quiet=(30, 36),
            fires=(44,),
            value="6",
        ),
        Scenario(
            "the pods start one by one",
            restarts("0x9 1 1 2 2 3 4 4 5 5 6 7 7 8x100", "uncharged"),
            quiet=(15, 20, 22, 24, 60),
        ),
        Scenario(
            "an autoscaler oscillates", restarts("0x9 0+2x190", "uncharged"), quiet=(9, 15), fires=(60,), value="30"
        ),
    ],
    "ElasticJobNotTraining": [
        Scenario(
            "agents run but never form a round",
            trained("0x200") | {STEPPING: NONE},
            quiet=(15,),
            fires=(25, 60),
            value="0s",
        ),
        Scenario(
            "the job fails repeatedly, each time with another leader",
            trained("0+60x20 1203 _x200", instance="a")
            | trained("_x21 1200+2x180", instance="b")
            | trained(NONE)
            | {STEPPING: "0+55x20 1100+2x180"},
            quiet=(20, 30),
            fires=(60,),
            value="20s",
        ),
        Scenario(
            "the job has waited for pods for hours and has just started",
            trained("_x90 0x3 0+60x100"),
            quiet=(89, 93, 95, 99, 110, 150),
        ),
        Scenario("the job has finished", trained("0+60x20 1200x2 _x170"), quiet=(25, 30, 35, 45, 60)),
        Scenario(
            "the job trains after an hour of restoring that was first counted as training",
            trained("0+60x60 3600x60 3600+60x80") | {STEPPING: "_x60 0+55x140"},
            quiet=(59, 75, 90, 110, 119, 150),
        ),
        Scenario(
            "the job is restored repeatedly, and makes a few steps each time",
            trained("1200x200") | {STEPPING: "0x19 0+4x180"},
            quiet=(15,),
            fires=(60,),
            value="0s",
        ),
        Scenario("the job is suspended", trained("0x200") | condition("Suspended", "1x200"), quiet=(25, 60)),
    ],
    "ElasticJobNoSteps": [
        Scenario("all workers hang", {STEPS: "0+50x20 1000x180"}, quiet=(20, 30, 45), fires=(55, 90)),
        Scenario(
            "steps take four minutes",
            {STEPS: "0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3 4 4 4 4 5 5 5 5 6 6 6 6 7 7 7 7 8 8 8 8 9 9 9 9 10 10 10 10"},
            quiet=(20, 30, 40),
        ),
        Scenario("the program reports no steps", {STEPS: NONE}, quiet=(30, 60)),
    ],
    "ElasticJobBudgetNearlySpent": [
        Scenario(
            "eight of ten failures have happened",
            restarts("0x9 7x10 8x170"),
            quiet=(9, 18),
            fires=(21, 60),
            about=OF_THE_JOB | {"budget": "maxRestarts"},
            value="2",
        ),
        Scenario(
            "five of six pods have failed",
            restarts("0x9 5x180", "pod_failed"),
            quiet=(9,),
            fires=(11,),
            about=OF_THE_JOB | {"budget": "backoffLimit"},
            value="1",
        ),
        Scenario(
            "the budget is 0, and nothing has failed",
            {f"elastic_operator_job_max_restarts{{{WHOSE}}}": "0x200"},
            quiet=(60,),
        ),
        Scenario("there were many uncharged restarts", restarts("9x200", "uncharged"), quiet=(60,)),
        Scenario("the job has failed", restarts("10x200") | condition("Finished", "1x200"), quiet=(60,)),
    ],
    "ElasticJobStoreUnreachable": [
        Scenario("etcd is unreachable", condition("StoreUnreachable", "0x9 1x190"), quiet=(9, 15), fires=(25,)),
        Scenario(
            "etcd is unreachable for a moment", condition("StoreUnreachable", "0x9 1x4 0x180"), quiet=(12, 16, 25)
        ),
    ],
    "ElasticJobCertificateExpires": [
        Scenario(
            "a certificate expires in a week", {EXPIRY: f"{7 * 86400 + 1200}x200"}, quiet=(10, 30), fires=(40, 90)
        ),
        Scenario("a certificate has expired", {EXPIRY: "0x200"}, quiet=(10,), fires=(20,)),
        Scenario("a certificate is renewed in its last week", {EXPIRY: "0x9 2000000000x190"}, quiet=(5, 14, 30, 60)),
    ],
    "ElasticJobNotScraped": [
        Scenario("no agent is scraped", {f"torchelastic_round{{{WHOSE}}}": NONE}, quiet=(10,), fires=(20,)),
        Scenario(
            "no agent runs",
            {f"torchelastic_round{{{WHOSE}}}": NONE} | condition("Running", "0x200"),
            quiet=(60,),
        ),
    ],
    "ElasticOperatorDown": [
        Scenario(
            "the operator is missing",
            {"elastic_operator_queue_depth": "0x9 _x190", "elastic_operator_leader": "1x9 _x190"},
            quiet=(9, 13),
            fires=(25,),
            about={},
        ),
        Scenario(
            "no replica acquires the Lease",
            {"elastic_operator_leader": "1x9 0x190"},
            quiet=(9, 13),
            fires=(25,),
            about={},
        ),
        Scenario(
            "the operator runs but may not list objects",
            {name: NONE for name in HEALTHY if name.startswith("elastic_operator_job_")}
            | {"elastic_operator_leader": "0x200", "elastic_operator_elasticjobs": "0x200"}
            | reconciled(success="0x200"),
            quiet=(3,),
            fires=(7, 180),
            about={},
        ),
        Scenario(
            "the operator has just started, and takes four minutes to list objects",
            {"elastic_operator_queue_depth": "0x200", "elastic_operator_leader": "0x4 1x190"},
            quiet=(3, 6, 25),
        ),
    ],
    "ElasticOperatorNotReconciling": [
        Scenario("no reconcile ends", reconciled(success="0+1x20 20x180"), quiet=(20, 30), fires=(45,), about={}),
        Scenario(
            "most reconciles fail",
            reconciled(success="0+1x200", error="0x20 0+3x180") | {"elastic_operator_elasticjobs": "4x200"},
            quiet=(20,),
            fires=(45,),
            about={},
        ),
        Scenario(
            "reconciles of one of three idle jobs fail",
            reconciled(success="0x4 1x4 3x4 3x4 5x4 7x4 7x4 9x4 11x4 11x4 13x4 15x100", error="0+1x200")
            | {"elastic_operator_elasticjobs": "3x200"},
            quiet=(20, 30, 45),
        ),
        Scenario(
            "reconciles of one job fail", reconciled(success="0+1x20 20x180", error="0x20 0+1x180"), quiet=(20, 45, 90)
        ),
        Scenario(
            "there are no jobs", reconciled(success="0x200") | {"elastic_operator_elasticjobs": "0x200"}, quiet=(45,)
        ),
    ],
}


def expected_annotations(alert: Alert, scenario: Scenario) -> dict[str, str]:
    """Return the expected annotations of the firing alert."""
    annotations = {
        "summary": alert.summary,
        "description": alert.about,
        "runbook_url": f"docs/runbooks/{alert.name}.md",
    }
    values = {
        "{{ $labels.job_namespace }}/{{ $labels.elasticjob }}": "team/digits",
        "{{ $labels.budget }}": scenario.about.get("budget", ""),
        **{f"{{{{ $value{how} }}}}": scenario.value for how in ("", " | humanize", " | humanizeDuration")},
    }
    for name, text in annotations.items():
        for template, value in values.items():
            annotations[name] = annotations[name].replace(template, value)
        assert "{{" not in annotations[name], text
    return annotations


def unit_test(name: str, series: Mapping[str, str], checks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a scenario for promtool: the series that differ from those of a healthy job, and the expected alerts."""
    shown = {name: values for name, values in {**HEALTHY, **series}.items() if values != NONE}
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in shown.items()],
        "alert_rule_test": checks,
    }


def assert_passes(folder: Path, tests: list[dict[str, Any]]) -> None:
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    run = promtool("test", "rules", file)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_fires_only_when_it_should(name: str, tmp_path: Path) -> None:
    tests = []
    for scenario in SCENARIOS[name]:
        expected = {
            "exp_labels": {"severity": str(ALERTS[name].severity), **scenario.about},
            "exp_annotations": expected_annotations(ALERTS[name], scenario),
        }
        checks: list[dict[str, Any]] = [
            {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": [expected] if minute in scenario.fires else []}
            for minute in (*scenario.quiet, *scenario.fires)
        ]
        tests.append(unit_test(scenario.name, scenario.series, checks))
    assert_passes(tmp_path, tests)


def test_every_alert_fires_in_one_scenario_and_stays_quiet_in_another() -> None:
    for name in ALERTS:
        assert any(scenario.fires for scenario in SCENARIOS[name]), name
        assert not all(scenario.fires for scenario in SCENARIOS[name]), name


def test_no_alert_fires_for_healthy_jobs(tmp_path: Path) -> None:
    checks: list[dict[str, Any]] = [
        {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []} for name in ALERTS for minute in (20, 60, 120)
    ]
    assert_passes(tmp_path, [unit_test("healthy", {}, checks)])


def test_promtool_accepts_rules_and_dashboards() -> None:
    run = promtool("check", "rules", "--lint-fatal", RULES)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(ALERTS)} rules found" in run.stdout
