"""The images of the Dockerfiles: their contents, and that they run as any user on a read-only file system."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.support.testbed import images

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.testbed.node import Node

pytestmark = [pytest.mark.node, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
SECURITY = {
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
FOUND = "import importlib.util, sys; print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
NOT_COMPILED = """
import pathlib, sysconfig
folder = pathlib.Path(sysconfig.get_path("purelib"))
sources = [path for name in ("torchelastic", "elastic_operator") for path in folder.glob(name + "/**/*.py")]
print(len(sources), *[path for path in sources if not list(path.parent.glob(f"__pycache__/{path.stem}.*.pyc"))])
"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def namespace(node: Node) -> AsyncIterator[str]:
    async with node.namespace(**RESTRICTED) as name:
        yield name


async def outcome(
    node: Node, namespace: str, image: str, *, seconds: int = 60, user: int | None = None, **container: Any
) -> tuple[int, str]:
    """Run a pod of an image, with only /tmp writable, to its end; returns its exit code and its output."""
    security = SECURITY if user is None else {**SECURITY, "runAsUser": user}
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": f"{image}-"},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "main",
                    "image": images.IMAGES[image],
                    "imagePullPolicy": "Never",
                    "securityContext": security,
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                    **container,
                }
            ],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }
    made = await node.kubectl(
        "create", f"--namespace={namespace}", "--filename=-", "--output=name", stdin=json.dumps(manifest)
    )
    pod = made.stdout.strip()
    ended = "--for=jsonpath={.status.containerStatuses[0].state.terminated}"
    await node.kubectl("wait", f"--namespace={namespace}", pod, ended, f"--timeout={seconds}s", timeout=seconds + 30)
    status = json.loads((await node.kubectl("get", f"--namespace={namespace}", pod, "--output=json")).stdout)["status"]
    said = (await node.kubectl("logs", f"--namespace={namespace}", pod)).stdout
    return status["containerStatuses"][0]["state"]["terminated"]["exitCode"], said


async def test_the_operator_image_runs_the_operator(node: Node, namespace: str) -> None:
    code, said = await outcome(node, namespace, "operator", args=["--help"])
    assert code == 0, said
    assert said.startswith("usage: elastic-operator")


async def test_the_agent_image_runs_the_agent(node: Node, namespace: str) -> None:
    code, said = await outcome(node, namespace, "agent")
    assert code == 0, said
    assert said.startswith("usage: torchelastic-run")


@pytest.mark.parametrize("image", ["operator", "agent"])
async def test_an_image_runs_as_an_unprivileged_user(node: Node, namespace: str, image: str) -> None:
    assert await outcome(node, namespace, image, command=["id", "-u"]) == (0, "65532\n")


@pytest.mark.parametrize("image", ["operator", "agent"])
async def test_an_image_runs_as_an_unknown_user(node: Node, namespace: str, image: str) -> None:
    code, said = await outcome(node, namespace, image, user=31415, args=["--help"])
    assert code == 0, said


@pytest.mark.parametrize("image", ["operator", "agent"])
async def test_every_project_module_is_compiled_in_an_image(node: Node, namespace: str, image: str) -> None:
    code, said = await outcome(node, namespace, image, command=["python3", "-c", NOT_COMPILED])
    assert code == 0, said
    number, *left_out = said.split()
    assert int(number) > 50
    assert left_out == []


async def test_the_operator_image_has_what_the_operator_needs_and_no_torch(node: Node, namespace: str) -> None:
    asked = ["kopf", "kubernetes", "torchelastic", "torch", "numpy", "pip"]
    code, said = await outcome(node, namespace, "operator", command=["python3", "-c", FOUND, *asked])
    assert (code, said.split()) == (0, ["kopf", "kubernetes", "torchelastic"])


async def test_the_agent_image_has_what_the_examples_need_and_nothing_of_kubernetes(node: Node, namespace: str) -> None:
    asked = ["kopf", "kubernetes", "torchelastic", "torch", "sklearn"]
    code, said = await outcome(node, namespace, "agent", command=["python3", "-c", FOUND, *asked])
    assert (code, said.split()) == (0, ["torchelastic", "torch", "sklearn"])


async def test_the_operator_image_contains_the_crd(node: Node, namespace: str) -> None:
    program = (
        "import importlib.resources as r; print(r.files('elastic_operator').joinpath('elasticjob.yaml').read_text())"
    )
    code, said = await outcome(node, namespace, "operator", command=["python3", "-c", program])
    assert code == 0, said
    assert said.rstrip() == (images.image_build.ROOT / "crds" / "elasticjob.yaml").read_text().rstrip()


async def test_the_agent_image_has_the_examples_in_its_working_directory(node: Node, namespace: str) -> None:
    code, said = await outcome(node, namespace, "agent", command=["sh", "-c", "pwd; ls"])
    folder, *files = said.split()
    assert (code, folder) == (0, "/workspace/examples")
    assert {"digits.py", "digits.yaml"} <= set(files)


async def test_an_example_trains_with_only_tmp_writable(node: Node, namespace: str) -> None:
    program = ["digits.py", "--epochs", "1", "--checkpoint-dir", "/tmp/checkpoints"]
    code, said = await outcome(
        node, namespace, "agent", args=["--standalone", "--nproc-per-node", "2", *program], seconds=180
    )
    assert code == 0, said


@pytest.mark.parametrize("image", ["operator", "agent"])
async def test_an_image_contains_no_build_machine_settings(node: Node, namespace: str, image: str) -> None:
    # The first one is Debian's own: it shows that the search works.
    names = " -o ".join(f"-name '{name}'" for name in ("70debconf", "*this-machine*", "authorities.pem", "pip.conf"))
    command = ["sh", "-c", f"find / -xdev {names} 2> /dev/null; true"]
    assert await outcome(node, namespace, image, command=command) == (0, "/etc/apt/apt.conf.d/70debconf\n")
