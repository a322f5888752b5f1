"""The control plane of the test bed: it is a Kubernetes, leaves the machine alone, and ends with the tests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.support.local_runs import gone
from tests.support.testbed.control_plane import ControlPlane
from tests.support.testbed.daemons import DaemonDied
from tests.support.testbed.user_cluster import DEFINITION, ClusterInUse, UserCluster

pytestmark = pytest.mark.control_plane

REPOSITORY = Path(__file__).parents[2]

SERVE = """
import asyncio, pathlib, sys
from tests.support.testbed.control_plane import ControlPlane

async def main():
    async with ControlPlane(pathlib.Path(sys.argv[1])) as control_plane:
        print(*(daemon.pid for daemon in control_plane.daemons.values()), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def listening_addresses(pid: int) -> set[str]:
    """The addresses on which a process listens; IPv6 addresses as in /proc."""
    sockets = {str(descriptor.readlink()) for descriptor in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    served = {line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}
    return {socket.inet_ntoa(bytes.fromhex(one)[::-1]) if len(one) == 8 else one for one in served}


async def test_users_files_are_unchanged_and_a_failed_part_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, folder = tmp_path / "home", tmp_path / "plane"
    (home / ".kube").mkdir(parents=True)
    folder.mkdir()
    users = home / ".kube" / "config"
    users.write_text("not even YAML: [")
    monkeypatch.setenv("KUBECONFIG", str(users))
    for variable in [name for name in os.environ if name.startswith("XDG_")]:
        monkeypatch.delenv(variable)
    async with ControlPlane(folder) as control_plane:
        environ = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
        await control_plane.run("kubectl", "get", "namespaces", env=environ)
        await control_plane.run("helm", "list", "--all-namespaces", env=environ)
        daemon = control_plane.daemons["kube-apiserver"]
        os.kill(daemon.pid, signal.SIGKILL)
        assert await gone([daemon.pid], within=10)
        with pytest.raises(DaemonDied, match=r"kube-apiserver ended by itself with -9; the end of its log:\n.+"):
            await control_plane.kubectl("get", "namespaces")
    assert [file.relative_to(home) for file in home.rglob("*")] == [Path(".kube"), Path(".kube/config")]
    assert users.read_text() == "not even YAML: ["


async def test_the_control_plane_listens_on_loopback_only_and_ends_with_the_tests(tmp_path: Path) -> None:
    tests = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, tmp_path, cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert tests.stdout is not None
    try:
        pids = [int(pid) for pid in (await tests.stdout.readline()).split()]
        listening = {address for pid in pids for address in listening_addresses(pid)}
    finally:
        tests.kill()
        await tests.wait()
    assert len(pids) == 4
    assert listening == {"127.0.0.1"}
    assert await gone(pids, within=10)


async def test_a_users_cluster_is_used_only_within_the_tests_own_namespaces(tmp_path: Path) -> None:
    folder, users = tmp_path / "plane", tmp_path / "users"
    folder.mkdir()
    users.mkdir()
    async with ControlPlane(folder) as real:
        before = real.kubeconfig.read_bytes()
        async with UserCluster(users, real.kubeconfig) as cluster:
            own = json.loads(cluster.kubeconfig.read_text())["contexts"][0]["context"]["namespace"]
            await cluster.kubectl("create", "configmap", "made")
            assert (await real.kubectl("get", "configmap/made", f"--namespace={own}", "--output=name")).stdout
            account = {"KUBECONFIG": str(await cluster.kubeconfig_for(own, "default"))}
            whoami = await cluster.run("kubectl", "auth", "whoami", env=account)
            assert f"system:serviceaccount:{own}:default" in whoami.stdout
        left = await real.kubectl("get", f"namespace/{own}", "--ignore-not-found", "--output=jsonpath={.status.phase}")
        assert left.stdout in {"", "Terminating"}
        await real.kubectl("create", "--filename", str(REPOSITORY / "crds" / "elasticjob.yaml"))
        with pytest.raises(ClusterInUse, match=f"kubectl delete crd {DEFINITION}"):
            await UserCluster(users, real.kubeconfig).__aenter__()
        assert real.kubeconfig.read_bytes() == before
