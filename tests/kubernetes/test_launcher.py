"""``launch(func, hostnames="kubernetes")`` on a real kubelet: from a laptop with a kubeconfig, and from a pod."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from testbed.program_pod import program_pod
from tests.support.cluster_user import ROOT, User

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from testbed.node import Node

pytestmark = [pytest.mark.node, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

FUNCTIONS = """\
import json, logging, os, signal, sys, time
import torchelastic.launcher as trx

PODS = dict(hostnames="kubernetes", image="elastic-agent:dev", workers=2, workers_per_host=1)
PLACE = dict(**PODS, agent_timeout=180, code="/files/code")

def ranks(word):
    import torch, torch.distributed as dist
    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.get_rank(), int(total), word, os.environ.get("WORD"), os.environ["HOSTNAME"]

def fail(how):
    import torch, torch.distributed as dist
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("the data are empty")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))

def write(lines):
    for number in range(lines):
        print("line", number)
    os.system("echo from a child; echo on standard error >&2")
    logging.getLogger("data").warning("a record")

def steps(number):
    import torch, torch.distributed as dist
    print("training", dist.get_rank(), "of", dist.get_world_size(), flush=True)
    for _ in range(number):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.1)
    return dist.get_world_size()

def seen(call, *args, **kwargs):
    try:
        return call(*args, **kwargs).by_ranks()
    except Exception as error:
        return [type(error).__name__, str(error), "".join(getattr(error, "__notes__", ()))]

def show(what):
    print("RESULT", json.dumps(what), flush=True)
"""


class Launching:
    """A pod with a program that launches; it has the packages of a notebook server, and no GPU."""

    def __init__(self, user: User, folder: Path, name: str) -> None:
        self.user = user
        self.folder = folder
        self.name = name

    async def start(self, **environ: str) -> None:
        """Start the pod."""
        (self.folder / "code").mkdir()
        (self.folder / "code" / "functions.py").write_text(FUNCTIONS)
        pod = program_pod(self.name, self.folder, host_network="KUBECONFIG" in environ, **environ)
        await self.user.kubectl("apply", "-f", "-", stdin=pod)
        await self.user.wait(f"pod/{self.name}", "condition=Ready")

    async def run(self, program: str) -> list[Any]:
        """Run a program in the pod, and return what it has shown."""
        source = f"from functions import *\nif __name__ == '__main__':\n    {program.strip()}\n"
        done = await self.user.kubectl("exec", self.name, "--", "python3", "-c", source)
        self.output = done.stdout + done.stderr
        return [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line[:7] == "RESULT "]

    async def begin(self, program: str, words: str) -> tuple[asyncio.subprocess.Process, list[str]]:
        """Begin to run a program in the pod; return it, and its lines up to the first with these words."""
        source = f"from functions import *\n{program.strip()}\n"
        argv = ("kubectl", "-n", self.user.namespace, "exec", self.name, "--", "python3", "-c", source)
        process = await self.user.node.popen(*argv)
        assert process.stdout is not None
        lines: list[str] = []
        async with asyncio.timeout(180):
            while words not in "".join(lines[-1:]):
                line = await process.stdout.readline()
                assert line, (lines, await process.communicate())
                lines.append(line.decode())
        return process, lines

    async def kill(self, words: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the program in the pod whose source contains these words."""
        await self.user.kill(await self.user.get(f"pod/{self.name}"), words, number)


@pytest_asyncio.fixture(loop_scope="session")
async def user(installed: Node) -> AsyncIterator[User]:
    """A user with a namespace."""
    async with installed.namespace() as namespace:
        yield User(installed, namespace)


@pytest_asyncio.fixture(loop_scope="session")
async def laptop(user: User, tmp_path: Path) -> Launching:
    """A machine with a kubeconfig whose user may do everything."""
    tmp_path.chmod(0o755)
    (config := tmp_path / "kubeconfig").write_text((await user.kubectl("config", "view", "--flatten", "--raw")).stdout)
    config.chmod(0o644)
    await user.kubectl("config", "set-context", "--current", f"--namespace={user.namespace}", f"--kubeconfig={config}")
    launching = Launching(user, tmp_path, "laptop")
    await launching.start(KUBECONFIG="/files/kubeconfig")
    return launching


@pytest_asyncio.fixture(loop_scope="session")
async def notebook(user: User, tmp_path: Path) -> Launching:
    """A pod whose service account has the role of the documentation."""
    tmp_path.chmod(0o755)
    [role] = re.findall(r"```yaml\n(.*?kind: Role\n.*?)```", (ROOT / "docs/launch.md").read_text(), re.DOTALL)
    await user.kubectl("apply", "-f", "-", stdin=role)
    account = f"{user.namespace}:default"
    await user.kubectl("create", "rolebinding", "launcher", "--role=launcher", f"--serviceaccount={account}")
    launching = Launching(user, tmp_path, "notebook")
    await launching.start()
    return launching


async def test_values_and_exceptions_of_pods_come_back_to_a_laptop_and_no_job_remains(laptop: Launching) -> None:
    values, raised, killed, missing = await laptop.run("""
    show(trx.launch(ranks, ("word",), **PLACE, extra_env_vars={"WORD": "from the laptop"}).by_hostnames())
    show(seen(trx.launch, fail, ("raise",), **PLACE))
    show(seen(trx.launch, fail, ("die",), **PLACE))
    show(seen(trx.launch, ranks, ("word",), **{**PLACE, "image": "no/such:image", "agent_timeout": 3}))
    """)
    assert [value for host in values.values() for value in host] == [
        [rank, 2, "word", "from the laptop", host] for rank, host in enumerate(values)
    ]
    assert raised[:2] == ["ValueError", "the data are empty"]
    assert "Raised by rank 1 on launch-" in raised[2]
    assert "functions.py" in raised[2]
    assert killed[0] == "WorkerFailedError"
    assert "killed by SIGKILL" in killed[1]
    assert missing[0] == "AgentFailedError"
    assert "the image no/such:image cannot be pulled" in missing[1]
    assert "Raise agent_timeout" in missing[1]
    assert (await laptop.user.kubectl("get", "elasticjobs", "-o", "name")).stdout == ""


async def test_a_kept_job_serves_one_launch_after_another_in_the_notebook_of_a_cluster(notebook: Launching) -> None:
    first, second, failed, third, name = await notebook.run("""
    launcher = trx.Launcher(**PLACE, keep=True)
    show(launcher.run(ranks, 1).by_ranks())
    show(launcher.run(ranks, 2).by_ranks())
    show(seen(launcher.run, fail, "raise"))
    handlers = [trx.file_handler(f"{launcher.job}-{index}", 0, f"/tmp/{index}") for index in range(2)]
    launcher.run(write, 50_000, log_handlers=handlers)
    show([open(f"/tmp/{index}").read().splitlines() for index in range(2)])
    show(launcher.job)
    """)
    assert [value[2] for value in first] == [1, 1]
    assert [value[2] for value in second] == [2, 2]
    assert {value[4] for value in first} == {value[4] for value in second}  # the same pods
    assert failed[1] == "the data are empty"
    expected = {*(f"line {number}" for number in range(50_000)), "from a child", "on standard error"}
    for lines in third:
        assert expected < {*lines}
        assert lines[-1].endswith("a record")
        assert len(lines) == len(expected) + 1

    # The launching program is killed during a call: the job serves the next one.
    process, _ = await notebook.begin(f"trx.attach({name!r}, code='/files/code').run(steps, 10_000)", "training")
    await notebook.kill("steps, 10_000")
    await process.communicate()
    [attached] = await notebook.run(
        f"show(trx.attach({name!r}, keep=False, code='/files/code').run(ranks, 3).by_ranks())"
    )
    assert [value[2] for value in attached] == [3, 3]
    assert (await notebook.user.kubectl("get", "elasticjobs", "-o", "name")).stdout == ""
    [unknown] = await notebook.run(f"show(seen(trx.attach({name!r}).run, ranks, 4))")
    assert f"there is no ElasticJob {name} in the namespace" in unknown[1]


async def test_a_launch_follows_scaling_and_lost_pods_and_ends_with_its_program(notebook: Launching) -> None:
    user = notebook.user
    process, _ = await notebook.begin(
        """show(trx.launch(steps, (80,), **{**PLACE, "workers": (1, 3)}, max_restarts=3).by_ranks())""", "training"
    )
    name = (await user.kubectl("get", "elasticjobs", "-o", "name")).stdout.strip()
    await user.wait(name, "jsonpath={.status.worldSize}=3")
    await user.kubectl("scale", name, "--replicas=2")
    await user.wait(name, "jsonpath={.status.worldSize}=2")
    pods = await user.pods(name.partition("/")[2])
    await user.kubectl("delete", "pod", min(pods), "--wait=false")
    out, err = await process.communicate()
    assert json.loads(out.decode().partition("RESULT ")[2].splitlines()[0]) == [2, 2], err

    process, _ = await notebook.begin("trx.launch(steps, (10_000,), **PLACE)", "training")
    name = (await user.kubectl("get", "elasticjobs", "-o", "name")).stdout.strip()
    await notebook.kill("steps, (10_000,)")
    await process.communicate()
    await user.wait(name, "condition=Failed")
    conditions = (await user.get(name))["status"]["conditions"]
    assert "the launching program has ended" in json.dumps(conditions)
    assert (await user.get(name))["spec"]["ttlSecondsAfterFinished"] == 3600

    process, _ = await notebook.begin("trx.launch(steps, (9_000,), **PLACE)", "training")
    await notebook.kill("steps, (9_000,)", signal.SIGINT)
    _, err = await process.communicate()
    assert b"KeyboardInterrupt" in err
    assert (await user.kubectl("get", "elasticjobs", "-o", "name")).stdout.splitlines() == [name]
