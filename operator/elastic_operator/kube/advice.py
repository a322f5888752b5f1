"""What to do about the most frequent refusals of Kubernetes and of etcds, whose words say what is wrong and no more."""

from __future__ import annotations

import re
from typing import Final

_ADVICE: Final = tuple(
    (re.compile(pattern), advice)
    for pattern, advice in (
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


def with_advice(words: str) -> str:
    """A refusal with what to do about it, where that is known.

    Args:
        words: the API server's own, or those about an etcd.
    """
    advice = next((advice for pattern, advice in _ADVICE if pattern.search(words)), "")
    return f"{words.removesuffix('.')}; {advice}" if advice else words
