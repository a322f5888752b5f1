"""A cluster of the user's own, used only because ``ELASTICJOB_TEST_KUBECONFIG`` names it.

Tests use only namespaces that they create. The cluster must not have the ElasticJob's definition yet: others may use
it, and its removal would delete all their jobs.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final, Self

from tests.support.testbed import commands
from tests.support.testbed.cluster import Cluster
from tests.support.testbed.installation import environment

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE: Final = "ELASTICJOB_TEST_KUBECONFIG"
DEFINITION: Final = "elasticjobs.elastic.pytorch.org"


class ClusterInUse(RuntimeError):  # noqa: N818 - the name is the reason
    """The user's cluster has ElasticJobs already."""


class UserCluster(Cluster):
    """The cluster that a kubeconfig's current context names; within ``async with`` it has a namespace for the tests.

    Args:
        folder: the folder of a copy of the kubeconfig and of all other files.
        kubeconfig: the user's; it is only read.
    """

    def __init__(self, folder: Path, kubeconfig: Path) -> None:
        self._folder = folder
        self._users = kubeconfig
        self._copy = folder / "kubeconfig"
        self._config: dict[str, list[dict[str, dict[str, object]]]] = {}

    async def __aenter__(self) -> Self:
        flat = await commands.run(
            "kubectl", "config", "view", "--raw", "--minify", "--flatten", "--output=json",
            environ=environment(self._folder, self._users, programs=("kubectl",)),
        )  # fmt: skip
        self._config = json.loads(flat.stdout)
        self._write(self._copy, flat.stdout)
        if (await self.kubectl("get", "crd", DEFINITION, "--ignore-not-found", "--output=name")).stdout:
            raise ClusterInUse(
                f"the cluster at {self.server}, which {VARIABLE} names, has the definition of ElasticJobs already, and "
                "the tests would replace and remove it. Name another cluster; or, if its jobs are not needed, "
                f"delete it with all of them: kubectl delete crd {DEFINITION}"
            )
        self._namespace = self.namespace()
        name = await self._namespace.__aenter__()
        self._config["contexts"][0]["context"]["namespace"] = name
        self._write(self._copy, json.dumps(self._config))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._namespace.__aexit__(None, None, None)

    @property
    def server(self) -> str:
        """The API server's URL."""
        return str(self._config["clusters"][0]["cluster"]["server"])

    @property
    def kubeconfig(self) -> Path:
        """A copy of the user's, for the tests' own namespace."""
        return self._copy

    @property
    def environ(self) -> dict[str, str]:
        """The environment for kubectl, helm and elasticjob."""
        return environment(self._folder, self._copy, programs=("kubectl",))

    def check(self) -> None:
        """Check nothing."""

    def kubeconfig_with(self, token: str, namespace: str) -> str:
        """The text of a kubeconfig with this token."""
        [context] = self._config["contexts"]
        mine = {**context, "context": {**context["context"], "namespace": namespace}}
        user = {"name": context["context"]["user"], "user": {"token": token}}
        return json.dumps({**self._config, "contexts": [mine], "users": [user]})

    def _write(self, file: Path, text: str) -> None:
        file.touch(mode=0o600)
        file.write_text(text)


def named() -> str | None:
    """The kubeconfig that the user wants to be used, if any."""
    return os.environ.get(VARIABLE) or None
