"""The handlers of kopf: each passes what it observes to the cache of objects.

All handlers of objects are event handlers: kopf's other handlers write finalizers or annotations into the objects. They
return nothing, because kopf writes a returned value into the object. There is no probe: kopf answers probes only while
its watches run, and the operator answers ``/healthz`` and ``/readyz`` from its start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import kopf

from elastic_operator.api.spec import GROUP, VERSION
from elastic_operator.kubernetes.kopf_session import KopfSession, configure

if TYPE_CHECKING:
    from collections.abc import Mapping

registry: Final = kopf.OperatorRegistry()


@kopf.on.startup(registry=registry)
async def start(settings: kopf.OperatorSettings, **_: object) -> None:
    """Turn off the features of kopf that the operator does not use."""
    configure(settings)


@kopf.on.login(registry=registry)
async def login(memo: KopfSession, **_: object) -> kopf.AiohttpSession:
    """Connect kopf with the operator's credentials."""
    return await memo.login()


@kopf.on.cleanup(registry=registry)
async def stop(memo: KopfSession, **_: object) -> None:
    """End the watches, and close their connections."""
    await memo.close()


@kopf.on.event(GROUP, VERSION, "elasticjobs", registry=registry)
@kopf.on.event("", "v1", "pods", registry=registry)
@kopf.on.event("", "v1", "services", registry=registry)
@kopf.on.event("apps", "v1", "deployments", registry=registry)
@kopf.on.event("policy", "v1", "poddisruptionbudgets", registry=registry)
@kopf.on.event("networking.k8s.io", "v1", "networkpolicies", registry=registry)
async def changed(event: Mapping[str, Any], resource: kopf.Resource, memo: KopfSession, **_: object) -> None:
    """Update the object in the cache, which queues its job."""
    memo.update_cache(resource.plural, event)
