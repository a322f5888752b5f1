"""Whether a stored spec has the types that this operator's definition promises.

The API server has checked it, but perhaps against another definition than this operator's.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from elastic_operator.archived import modern
from elastic_operator.spec import MANAGER, CleanPodPolicy, FailureAction, GangScheduler


def misfit_of(spec: object) -> str | None:
    """What has another type than it should have, and where; None where nothing has."""
    try:
        msgspec.convert(modern(spec) if isinstance(spec, dict) else spec, _SpecShape)
    except msgspec.ValidationError as error:
        return str(error)
    return None


class _EtcdShape(msgspec.Struct, rename="camel"):
    endpoint: str | None = None
    tls_secret: str | None = None
    image: str | None = None
    resources: dict[str, Any] | None = None
    storage: dict[str, Any] | None = None


class _CheckpointShape(msgspec.Struct):
    volume: dict[str, Any] | None = None


class _CodesShape(msgspec.Struct):
    operator: Literal["In", "NotIn"]
    values: list[int]


class _PodConditionShape(msgspec.Struct):
    type: str
    status: str = "True"


class _RuleShape(msgspec.Struct, rename="camel"):
    action: FailureAction
    on_exit_codes: _CodesShape | None = None
    on_pod_reasons: list[str] | None = None
    on_pod_conditions: list[_PodConditionShape] | None = None
    exclude_node: bool = False


class _FailurePolicyShape(msgspec.Struct):
    rules: list[_RuleShape] | None = None


class _SchedulingShape(msgspec.Struct, rename="camel"):
    gang: GangScheduler | None = None
    scheduler_name: str | None = None
    queue: str = ""
    priority_class_name: str = ""


class _PortsShape(msgspec.Struct):
    first: int
    last: int


class _RendezvousShape(msgspec.Struct, rename="camel"):
    joining_window_seconds: int | None = None
    join_timeout_seconds: int | None = None
    lease_seconds: int | None = None
    ports: _PortsShape | None = None


class _SpecShape(msgspec.Struct, rename="camel"):
    """What the API server has checked, as far as types go."""

    min_replicas: int
    max_replicas: int
    replicas: int | None = None
    image: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[dict[str, Any]] | None = None
    nproc_per_node: int | str = 1
    max_restarts: int = 100
    backoff_limit: int | msgspec.UnsetType = msgspec.UNSET
    suspend: bool = False
    managed_by: str = MANAGER
    active_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int | None = None
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    failure_policy: _FailurePolicyShape | None = None
    scheduling_policy: _SchedulingShape | None = None
    rendezvous: _RendezvousShape | None = None
    grace_period_seconds: int | None = None
    node_loss_seconds: int = 15
    disruption_budget: bool = False
    metrics_port: int | None = None
    etcd: _EtcdShape | None = None
    checkpoint: _CheckpointShape | None = None
    template: dict[str, Any] | None = None
