"""Hints for the most frequent errors of Kubernetes and etcd, whose messages only say what is wrong."""

from __future__ import annotations

import re
from typing import Final

_HINTS: Final = tuple(
    (re.compile(pattern), hint)
    for pattern, hint in (
        (
            r"error looking up service account|serviceaccount \"[^\"]*\" not found",
            "create it, or name another one in spec.template.spec.serviceAccountName",
        ),
        (
            r"no PriorityClass with name ",
            "create it, or name another one in spec.schedulingPolicy.priorityClassName, or in the template",
        ),
        (
            r"certificate of etcd at .* cannot be trusted: .*(self.signed|issuer|first certificate)",
            "name a Secret in spec.etcd.tlsSecret whose ca.crt is the certificate of its authority",
        ),
        (r"User \"[^\"]*\" cannot \w+ resource ", "grant the operator its rights there (the chart's role has them)"),
        (r"exceeded quota: ", "raise that quota, free some of it, or have the job ask for less"),
        (
            r"failed quota: .* must specify ",
            "say so in spec.template.spec.containers, and for the job's etcd in spec.etcd.resources",
        ),
        (r"(secret|configmap) \"[^\"]*\" not found", "create it, or name another one in spec.template"),
        (r"violates PodSecurity ", "say so in spec.template.spec, or have the namespace admit such pods"),
    )
)


def with_hint(message: str) -> str:
    """Add a hint to an error message, if there is one."""
    hint = next((hint for pattern, hint in _HINTS if pattern.search(message)), "")
    return f"{message.removesuffix('.')}; {hint}" if hint else message
