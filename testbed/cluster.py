"""Operations that tests perform on a cluster: a control plane without nodes, or a cluster with one node."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import signal
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from testbed import control_plane_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from testbed.control_plane_config import ControlPlaneConfig

DEFAULT_TIMEOUT = 180.0
"""The default time limit of a command in seconds."""


@dataclass(frozen=True)
class Result:
    """The result of a command."""

    stdout: str
    stderr: str
    returncode: int


class CommandFailed(AssertionError):  # noqa: N818 - an assertion of the test failed, so there is no suffix Error
    """A required command failed, or took too long."""

    def __init__(self, argv: Sequence[str], how: str, output: str) -> None:
        super().__init__(f"`{' '.join(argv)}` {how}:\n{output}")


class Cluster(abc.ABC):
    """A cluster in which tests have all permissions.

    Attributes:
        control_plane: the addresses and files of its control plane.
    """

    control_plane: ControlPlaneConfig

    @property
    def server(self) -> str:
        """The API server's URL."""
        return self.control_plane.server

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of an administrator, which all commands use."""
        return self.control_plane.kubeconfig

    @property
    def environ(self) -> dict[str, str]:
        """The environment for kubectl, helm and elasticjob, without the user's files."""
        return control_plane_config.environment(self.control_plane, programs=("kubectl", "helm"))

    @abc.abstractmethod
    def check(self) -> None:
        """Check that the cluster runs; raise an error with the reason if it does not."""

    def command_prefix(self) -> tuple[str, ...]:
        """Return the prefix of a command line that runs a command with access to the cluster's network."""
        return ()

    async def run(
        self,
        *argv: str,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = DEFAULT_TIMEOUT,  # noqa: ASYNC109 - as in subprocess
    ) -> Result:
        """Run a command as a user of this cluster.

        Args:
            argv: the command, such as kubectl, helm or elasticjob with arguments.
            stdin: the input of the command; None for no input.
            env: more variables.
            check: whether the command must succeed.
            timeout: seconds after which the command is killed with all its processes.

        Raises:
            CommandFailed: the command took too long, or failed and ``check`` is true.
        """
        process = await asyncio.create_subprocess_exec(
            *self.command_prefix(),
            *argv,
            env={**self.environ, **(env or {})},
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout):
                out, err = await process.communicate(None if stdin is None else stdin.encode())
        except TimeoutError:
            self.check()  # an error about a failed cluster explains more
            raise CommandFailed(argv, f"took longer than {timeout:.0f} s", "") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        assert process.returncode is not None
        result = Result(out.decode(errors="replace"), err.decode(errors="replace"), process.returncode)
        if check and result.returncode != 0:
            self.check()
            raise CommandFailed(argv, f"exited with code {result.returncode}", result.stdout + result.stderr)
        return result

    async def kubectl(
        self,
        *arguments: str,
        stdin: str | None = None,
        check: bool = True,
        timeout: float = DEFAULT_TIMEOUT,  # noqa: ASYNC109 - as in subprocess
    ) -> Result:
        """Run kubectl; see :meth:`run`."""
        return await self.run("kubectl", *arguments, stdin=stdin, check=check, timeout=timeout)

    async def apply_crd(self, manifest: str) -> None:
        """Apply a CRD, and wait until it is established."""
        await self.kubectl("apply", "--filename=-", stdin=manifest)
        while True:
            wait = ("wait", "--for=condition=Established", "--filename=-", "--timeout=60s")
            result = await self.kubectl(*wait, stdin=manifest, check=False)
            if result.returncode == 0:
                return
            # kubectl does not wait for a condition of an object that has no conditions yet.
            assert "accessor error" in result.stderr, result.stderr

    @contextlib.asynccontextmanager
    async def namespace(self, **labels: str) -> AsyncIterator[str]:
        """Create a namespace, wait for its default service account, and delete the namespace after the block."""
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
        """Write a kubeconfig with a service account token that is valid for one day; return the file's path."""
        made = await self.kubectl("create", "token", service_account, f"--namespace={namespace}", "--duration=24h")
        with tempfile.NamedTemporaryFile(
            "w", dir=self.kubeconfig.parent, prefix=f"{service_account}-", suffix=".kubeconfig", delete=False
        ) as file:
            token, authority = made.stdout.strip(), self.control_plane.authority
            file.write(
                control_plane_config.kubeconfig(self.server, token=token, namespace=namespace, authority=authority)
            )
        return Path(file.name)
