"""What a job's condition says of the refusals that Kubernetes gives most often."""

from __future__ import annotations

import pytest

from elastic_operator.kubernetes.client import with_hint


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            'error looking up service account team/trainer: serviceaccount "trainer" not found',
            "create it, or name another one in spec.template.spec.serviceAccountName",
        ),
        (
            (
                'User "system:serviceaccount:elastic-system:operator" cannot create resource "pods" in API group '
                '"" in the namespace "team"'
            ),
            "grant the operator its rights there",
        ),
        (
            'pods "digits-0-x" is forbidden: no PriorityClass with name high was found',
            "create it, or name another one in spec.schedulingPolicy.priorityClassName",
        ),
        (
            "the certificate of etcd at a:2379 cannot be trusted: self-signed certificate in certificate chain",
            "name a Secret in spec.etcd.tlsSecret whose ca.crt",
        ),
        (
            "the certificate of etcd at a:2379 cannot be trusted: unable to get local issuer certificate",
            "name a Secret in spec.etcd.tlsSecret whose ca.crt",
        ),
        ("exceeded quota: few, requested: pods=1, used: pods=1, limited: pods=1", "raise that quota"),
        ('pods "digits-etcd-5" is forbidden: exceeded quota: few.', "raise that quota"),
        ("failed quota: compute: must specify limits.cpu for: worker", "say so in spec.template.spec.containers"),
        (
            (
                'violates PodSecurity "restricted:latest": runAsNonRoot != true (container "worker" must set '
                "securityContext.runAsNonRoot=true)"
            ),
            "say so in spec.template.spec",
        ),
    ],
)
def test_what_to_do_follows_the_words_of_the_cluster(words: str, advice: str) -> None:
    said = with_hint(words)
    assert said.startswith(f"{words.removesuffix('.')}; {advice}")


def test_words_for_which_there_is_no_advice_stay_as_they_are() -> None:
    assert with_hint('admission webhook "gate.example.org" denied the request: not today') == (
        'admission webhook "gate.example.org" denied the request: not today'
    )
