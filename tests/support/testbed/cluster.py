"""What tests do with a cluster, whichever it is: the control plane of the test bed, or the user's own."""

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
    """A cluster as somebody who may do everything there; commands run on this machine."""

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
        """In which kubectl, helm and elasticjob reach it and leave the user's files alone."""

    @abc.abstractmethod
    def kubeconfig_with(self, token: str, namespace: str) -> str:
        """The text of a kubeconfig for whoever has this token."""

    @abc.abstractmethod
    def check(self) -> None:
        """See that it runs; raises an error that says why not."""

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
            argv: such as kubectl, helm or elasticjob with arguments.
            stdin: what it reads.
            env: more of its environment.
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
            self.check()  # if the cluster has fallen down, that is the better story
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
        """Apply a definition of custom resources, and wait until it is in force."""
        await self.kubectl("apply", "--filename=-", stdin=text)
        while True:
            wait = ("wait", "--for=condition=Established", "--filename=-", "--timeout=60s")
            told = await self.kubectl(*wait, stdin=text, check=False)
            if told.returncode == 0:
                return
            # kubectl does not wait for a condition of what has no conditions at all yet.
            assert "accessor error" in told.stderr, told.stderr

    @contextlib.asynccontextmanager
    async def namespace(self, **labels: str) -> AsyncIterator[str]:
        """A namespace of one's own, in which pods can be made at once; it goes at the end."""
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
        """A kubeconfig of a service account, by a token of a day; the account must be there."""
        made = await self.kubectl("create", "token", service_account, f"--namespace={namespace}", "--duration=24h")
        with tempfile.NamedTemporaryFile(
            "w", dir=self.kubeconfig.parent, prefix=f"{service_account}-", suffix=".kubeconfig", delete=False
        ) as file:
            file.write(self.kubeconfig_with(made.stdout.strip(), namespace))
        return Path(file.name)
