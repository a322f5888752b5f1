"""The settings of a launch as options of :mod:`argparse`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchelastic.errors import SettingsError
from torchelastic.launcher.launcher import BACKENDS, DEFAULT_ENV_VARS_FOR_COPY, Launcher

if TYPE_CHECKING:
    import argparse


def add_torchrunx_argument_group(parser: argparse.ArgumentParser) -> None:
    """Add a group with the options of a launch to a parser; :func:`launcher_from_args` reads them."""
    add = parser.add_argument_group("torchrunx").add_argument
    add(
        "--hostnames", nargs="+", default=["auto"], help='the hosts, or "slurm"; "auto": the allocation or this machine'
    )
    add("--workers-per-host", nargs="+", default=["auto"], help='a number, one for each host, "gpu", "cpu" or "auto"')
    add("--ssh-config-file", help="instead of ~/.ssh/config")
    add("--backend", default="auto", choices=[f"{each}" for each in BACKENDS], help="of the process group")
    add("--timeout", "--worker-timeout", type=int, default=600, help="seconds after which a collective fails")
    add("--agent-timeout", type=int, default=60, help="seconds within which all hosts must meet")
    add("--copy-env-vars", nargs="+", default=DEFAULT_ENV_VARS_FOR_COPY, help="patterns of variables for other hosts")
    add("--extra-env-vars", nargs="*", default=[], metavar="NAME=VALUE", help="variables of all workers")
    add("--env-file", help="a script of bash that sets variables of the workers")


def launcher_from_args(args: argparse.Namespace) -> Launcher:
    """Return the launcher with the settings that the options state.

    Raises:
        SettingsError: an option is invalid.
    """
    variables = [text.partition("=") for text in args.extra_env_vars]
    if wrong := [name for name, equals, _ in variables if not (name and equals)]:
        raise SettingsError(f"--extra-env-vars contains {wrong[0]!r}: it must be NAME=VALUE.")
    counts: list[Any] = [int(text) if text.isdecimal() else text for text in args.workers_per_host]
    return Launcher(
        args.hostnames,
        counts[0] if len(counts) == 1 else counts,
        args.ssh_config_file,
        None if args.backend == "None" else args.backend,
        args.timeout,
        tuple(args.copy_env_vars),
        {name: value for name, _, value in variables},
        args.env_file,
        agent_timeout=args.agent_timeout,
    )
