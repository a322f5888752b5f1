"""What the operator's set-up decides about the pods of all jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ETCD_IMAGE: Final = "quay.io/coreos/etcd:v3.7.3"
AGENT_METRICS_PORT: Final = 9464


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """What pods are made with where the job does not say.

    Attributes:
        etcd_image: of the etcd that is made for a job; it has ``etcd`` on its PATH.
        agent_metrics_port: where agents serve /metrics; 0 for any free port, which is noted on the pod once its agent
            has told it. So it is in any case on the host's network, where two pods can't share a port.
    """

    etcd_image: str = ETCD_IMAGE
    agent_metrics_port: int = AGENT_METRICS_PORT
