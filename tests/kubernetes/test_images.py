"""The images of the Dockerfiles have the right contents, and run as any user on a read-only file system."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from testbed import image_build, images

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from testbed.node import Node

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
    """Run a pod of an image with only /tmp writable until it exits, and return its exit code and its output."""
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


@pytest.mark.parametrize(("image", "args"), [("operator", ["--help"]), ("agent", [])])
async def test_an_image_runs_its_program_even_as_an_unknown_user(
    node: Node, namespace: str, image: str, args: list[str]
) -> None:
    program = {"operator": "elastic-operator", "agent": "torchelastic-run"}[image]
    for user in (None, 31415):
        code, said = await outcome(node, namespace, image, user=user, args=args)
        assert code == 0, said
        assert said.startswith(f"usage: {program}")


@pytest.mark.parametrize("image", ["operator", "agent"])
async def test_an_image_has_compiled_modules_and_no_settings_of_the_build_machine(
    node: Node, namespace: str, image: str
) -> None:
    # The first file is part of Debian: finding it shows that the search works.
    names = " -o ".join(f"-name '{name}'" for name in ("70debconf", "*this-machine*", "authorities.pem", "pip.conf"))
    script = f'id -u; find / -xdev {names} 2> /dev/null; python3 -c "$0"'
    code, said = await outcome(node, namespace, image, command=["sh", "-c", script, NOT_COMPILED])
    assert code == 0, said
    user, found, compiled = said.splitlines()
    assert (user, found) == ("65532", "/etc/apt/apt.conf.d/70debconf")
    number, *left_out = compiled.split()
    assert int(number) > 50
    assert left_out == []


@pytest.mark.parametrize(
    ("image", "there", "absent"),
    [
        ("operator", ["kopf", "kubernetes", "torchelastic"], ["torch", "numpy", "pip"]),
        ("agent", ["torchelastic", "torch", "sklearn"], ["kopf", "kubernetes"]),
    ],
)
async def test_an_image_has_the_packages_that_it_needs_and_no_others(
    node: Node, namespace: str, image: str, there: list[str], absent: list[str]
) -> None:
    code, said = await outcome(node, namespace, image, command=["python3", "-c", FOUND, *there, *absent])
    assert (code, said.split()) == (0, there)


async def test_the_operator_image_contains_the_crd(node: Node, namespace: str) -> None:
    program = (
        "import importlib.resources as r; print(r.files('elastic_operator').joinpath('elasticjob.yaml').read_text())"
    )
    code, said = await outcome(node, namespace, "operator", command=["python3", "-c", program])
    assert code == 0, said
    assert said.rstrip() == (image_build.ROOT / "crds" / "elasticjob.yaml").read_text().rstrip()


async def test_an_example_of_the_working_directory_trains_with_only_tmp_writable(node: Node, namespace: str) -> None:
    program = ["digits.py", "--epochs", "1", "--checkpoint-dir", "/tmp/checkpoints"]
    code, said = await outcome(
        node, namespace, "agent", args=["--standalone", "--nproc-per-node", "2", *program], seconds=180
    )
    assert code == 0, said
