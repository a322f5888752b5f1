"""The control plane of the test bed: it listens on loopback only, changes no user files, and exits with the tests."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from testbed.control_plane import ControlPlane
from testbed.daemons import DaemonDied
from tests.support.local_runs import gone
from tests.support.ports import sockets

pytestmark = pytest.mark.control_plane

REPOSITORY = Path(__file__).parents[2]

SERVE = """
import asyncio, pathlib, sys
from testbed.control_plane import ControlPlane

async def main():
    async with ControlPlane(pathlib.Path(sys.argv[1])) as control_plane:
        print(*(daemon.pid for daemon in control_plane.daemons.values()), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_the_control_plane_leaves_files_of_the_user_unchanged_and_reports_a_failed_part(
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


async def test_the_control_plane_listens_on_loopback_only_and_exits_with_the_tests(tmp_path: Path) -> None:
    tests = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, tmp_path, cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert tests.stdout is not None
    try:
        pids = [int(pid) for pid in (await tests.stdout.readline()).split()]
        listening = {each.address for pid in pids for each in sockets(pid) if each.listens}
    finally:
        tests.kill()
        await tests.wait()
    assert len(pids) == 4
    assert listening == {"127.0.0.1"}
    assert await gone(pids, within=10)
