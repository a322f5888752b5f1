"""The spec of an ElasticJob as the plan sees it: typed, with every default filled in.

The CRD (crds/elasticjob.yaml) is the one source of truth for what is allowed; this module only turns a manifest that
has passed it into frozen dataclasses, so that nothing below has to ask whether a field is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

GROUP: Final = "elastic.pytorch.org"
VERSION: Final = "v1alpha1"
KIND: Final = "ElasticJob"
PLURAL: Final = "elasticjobs"

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EtcdSpec:
    """The store of the job.

    Attributes:
        endpoint: host:port (several: with commas) of an etcd that is there already; None to have one made for the job.
        image: of the managed one.
        resources: of the managed one, as in a container's spec.
        storage: of the managed one, as in a volume claim: None keeps its data for the life of its pod.
    """

    endpoint: str | None = None
    image: str | None = None
    resources: Json = field(default_factory=dict)
    storage: Json | None = None


@dataclass(frozen=True, slots=True)
class ElasticJobSpec:
    """What the user asked for.

    Attributes:
        min_replicas: fewer pods than this never train.
        max_replicas: more pods than this are never made.
        replicas: the wanted number; None until the operator has written one.
        image: of the worker container; None where the template names it.
        command: the program that each worker is; empty to have ``args`` appended to torchelastic-run.
        args: see ``command``.
        env: more environment variables, each as in a container's spec.
        nproc_per_node: workers in each pod: a number, or "auto", "cpu", "gpu".
        max_restarts: how many failures of workers the whole job may have.
        etcd: the store.
        checkpoint_volume: any volume source; None for an emptyDir, which is lost with its pod.
        template: a pod template, as the user wrote it.
    """

    min_replicas: int
    max_replicas: int
    replicas: int | None = None
    image: str | None = None
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[Json, ...] = ()
    nproc_per_node: int | str = 1
    max_restarts: int = 100
    etcd: EtcdSpec = field(default_factory=EtcdSpec)
    checkpoint_volume: Json | None = None
    template: Json = field(default_factory=dict)

    @property
    def desired(self) -> int:
        """How many pods there should be: the wanted number, kept within the bounds."""
        wanted = self.max_replicas if self.replicas is None else self.replicas
        return min(max(wanted, self.min_replicas), self.max_replicas)

    @classmethod
    def of(cls, spec: Json) -> ElasticJobSpec:
        """The typed form of a ``spec`` that has passed the CRD's validation."""
        etcd = spec.get("etcd") or {}
        return cls(
            min_replicas=spec["minReplicas"],
            max_replicas=spec["maxReplicas"],
            replicas=spec.get("replicas"),
            image=spec.get("image"),
            command=tuple(spec.get("command") or ()),
            args=tuple(spec.get("args") or ()),
            env=tuple(spec.get("env") or ()),
            nproc_per_node=spec.get("nprocPerNode", 1),
            max_restarts=spec.get("maxRestarts", 100),
            etcd=EtcdSpec(
                endpoint=etcd.get("endpoint"),
                image=etcd.get("image"),
                resources=etcd.get("resources") or {},
                storage=etcd.get("storage"),
            ),
            checkpoint_volume=(spec.get("checkpoint") or {}).get("volume"),
            template=spec.get("template") or {},
        )
