"""A job on the network of its node: several agents on one node, without ports in the specs of their pods."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.cluster_user import job

if TYPE_CHECKING:
    from tests.support.cluster_user import User

pytestmark = [pytest.mark.node, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

READ = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"


async def test_agents_on_host_network_serve_metrics_on_the_ports_of_their_annotations(user: User) -> None:
    enforced = "pod-security.kubernetes.io/enforce"
    await user.kubectl("label", "namespace", user.namespace, f"{enforced}=privileged", "--overwrite")
    pod = {"hostNetwork": True, "securityContext": {"runAsNonRoot": True}}
    await user.apply(job("hosted", replicas=2, template={"spec": pod}))
    await user.wait("elasticjob/hosted", "jsonpath={.status.worldSize}=2")
    places = set()
    for name in await user.pods("hosted"):
        await user.wait(f"pod/{name}", r"jsonpath={.metadata.annotations.elastic\.pytorch\.org/metrics-port}")
        found = await user.get(f"pod/{name}")
        notes = found["metadata"]["annotations"]
        assert notes["prometheus.io/scrape"] == "true"
        places.add(place := f"{found['status']['podIP']}:{notes['prometheus.io/port']}")
        page = (await user.node.run("python3", "-c", READ, f"http://{place}{notes['prometheus.io/path']}")).stdout
        assert 'elasticjob="hosted"' in page
    assert len(places) == 2

    shown = (await user.elasticjob("describe", "hosted")).stdout
    assert all(place in shown for place in places)
    figures = (await user.elasticjob("top", "hosted")).stdout
    assert all(name in figures for name in await user.pods("hosted"))
    assert await user.delete("hosted") == []
