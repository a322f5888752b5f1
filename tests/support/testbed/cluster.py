"""The operations of tests on a cluster: the control plane of the test bed, or the user's own cluster."""

from __future__ import annotations

import abc
import contextlib
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.testbed import commands

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from tests.support.testbed.commands import Result


class Cluster(abc.ABC):
    """A cluster with all permissions; commands run on this machine."""

    @property
    @abc.abstractmethod
    def server(self) -> str:
        """The API server's URL."""

    @property
    @abc.abstractmethod
    def kubeconfig(self) -> Path:
        """The kubeconfig that all commands use."""

    @property
    @abc.abstractmethod
    def environ(self) -> dict[str, str]:
        """The environment for kubectl, helm and elasticjob, without the user's files."""

    @abc.abstractmethod
    def kubeconfig_with(self, token: str, namespace: str) -> str:
        """The text of a kubeconfig with this token."""

    @abc.abstractmethod
    def check(self) -> None:
        """Check that it runs; raises an error with the reason if it does not."""

    async def run(
        self,
        *argv: str,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = commands.LIMIT,  # noqa: ASYNC109 - as subprocess has it
    ) -> Result:
        """Run a command of a user of this cluster.

        Args:
            argv: the command, such as kubectl, helm or elasticjob with arguments.
            stdin: its input.
            env: more variables.
            check: whether it must succeed.
            timeout: seconds after which it is killed.

        Raises:
            CommandFailed: it failed although it must not, or it took too long.
        """
        try:
            return await commands.run(
                *argv, environ={**self.environ, **(env or {})}, stdin=stdin, check=check, timeout=timeout
            )
        except commands.CommandFailed:
            self.check()  # if the cluster has failed, that is the better error
            raise

    async def kubectl(
        self,
        *arguments: str,
        stdin: str | None = None,
        check: bool = True,
        timeout: float = commands.LIMIT,  # noqa: ASYNC109 - as subprocess has it
    ) -> Result:
        """Run kubectl; see :meth:`run`."""
        return await self.run("kubectl", *arguments, stdin=stdin, check=check, timeout=timeout)

    async def define(self, text: str) -> None:
        """Apply a CRD, and wait until it is established."""
        await self.kubectl("apply", "--filename=-", stdin=text)
        while True:
            wait = ("wait", "--for=condition=Established", "--filename=-", "--timeout=60s")
            result = await self.kubectl(*wait, stdin=text, check=False)
            if result.returncode == 0:
                return
            # kubectl does not wait for a condition of an object that has no conditions yet.
            assert "accessor error" in result.stderr, result.stderr

    @contextlib.asynccontextmanager
    async def namespace(self, **labels: str) -> AsyncIterator[str]:
        """A new namespace in which pods can be created at once; it is deleted at the end."""
        name = f"test-{uuid.uuid4().hex[:12]}"
        await self.kubectl("create", "namespace", name)
        try:
            if labels:
                await self.kubectl("label", "namespace", name, *(f"{key}={value}" for key, value in labels.items()))
            await self.kubectl("wait", "--for=create", "serviceaccount/default", f"--namespace={name}", "--timeout=60s")
            yield name
        finally:
            await self.kubectl("delete", "namespace", name, "--wait=false", check=False)

    async def kubeconfig_for(self, namespace: str, service_account: str) -> Path:
        """A kubeconfig of an existing service account, with a token for a day."""
        made = await self.kubectl("create", "token", service_account, f"--namespace={namespace}", "--duration=24h")
        with tempfile.NamedTemporaryFile(
            "w", dir=self.kubeconfig.parent, prefix=f"{service_account}-", suffix=".kubeconfig", delete=False
        ) as file:
            file.write(self.kubeconfig_with(made.stdout.strip(), namespace))
        return Path(file.name)
