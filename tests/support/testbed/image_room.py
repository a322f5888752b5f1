"""An isolated environment for image builds: changes to /etc, /run and /var vanish with it, also when it is killed.

buildah and debootstrap expect their own machine: they write below /etc and /var, and mount. So they run in
mount and PID namespaces that end with this process, with overlays over those folders. They use the machine's
network, and write into the cache folder only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from typing import TYPE_CHECKING, Final

from tests.support.testbed import packages
from tests.support.testbed.cache import Missing, cache_folder, locked

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENTER: Final = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"),
)

_ROOM: Final = r"""
set -e
exec 3<"$CACHE"
mkdir "$ROOM/run" "$ROOM/names"
# In a container these two are mounts of their own, which an overlay does not show.
cat /etc/resolv.conf > "$ROOM/names/resolv.conf"
cat /etc/hosts > "$ROOM/names/hosts"
mount -t tmpfs -o mode=755 room "$ROOM/run"
for folder in etc run var; do
    upper="$ROOM/run/$folder" work="$ROOM/run/$folder.work"
    mkdir "$upper" "$work"
    mount -t overlay -o "lowerdir=/$folder,upperdir=$upper,workdir=$work" overlay "/$folder"
done
mount --no-canonicalize --bind /proc/self/fd/3 "$CACHE"
exec 3<&-
for name in resolv.conf hosts; do
    rm -f "/etc/$name"
    cat "$ROOM/names/$name" > "/etc/$name"
done
mkdir -p /etc/containers
cp -r "$TOOLS"/etc/containers/. /etc/containers/
# buildah starts itself anew with an empty environment, so that its libraries must be found without LD_LIBRARY_PATH.
echo "$LD_LIBRARY_PATH" | tr : '\n' > /etc/ld.so.conf.d/000-tools.conf
unset LD_LIBRARY_PATH
ldconfig -X
exec "$@"
"""
"""Mounts the overlays; the cache folder may be below one of them and is mounted again."""

_PREFIX: Final = "room-"
_TAIL: Final = 4000
"""Characters of a failed command's output in the error."""

_REMEDY: Final = (
    "the first time, Debian's and Python's packages must be reachable, and 20 GB be free in the cache folder"
)


def run(script: str, *, makes: str, limit: float, env: Mapping[str, str]) -> None:
    """Run a shell script in an isolated environment with the programs of the package set "build".

    Args:
        script: for `sh`.
        makes: a description of the result.
        limit: seconds after which it is killed.
        env: more variables.

    Raises:
        Missing: this user is not root, or the script failed.
    """
    if os.geteuid() != 0:
        raise Missing("root", "images are built in namespaces: run `make test` as root")
    tools = packages.unpacked("build")
    with locked("room"):
        _sweep()
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=_PREFIX, ignore_cleanup_errors=True) as room:
            environment = {
                **os.environ,
                **packages.environment(tools),
                "LC_ALL": "C",
                "DEBOOTSTRAP_DIR": str(tools / "usr/share/debootstrap"),
                "CACHE": str(cache_folder().resolve()),
                "ROOM": room,
                "TOOLS": str(tools),
                "TMPDIR": room,
                **env,
            }
            try:
                done = subprocess.run(
                    [*_ENTER, "sh", "-c", _ROOM, "room", "sh", "-e", "-c", script],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    check=False,
                    timeout=limit,
                )
            except subprocess.TimeoutExpired as error:
                raise Missing(f"{makes}, which took longer than {limit:.0f} s", _REMEDY) from error
    if done.returncode:
        raise Missing(f"{makes}, which could not be made:\n{done.stdout[-_TAIL:]}", _REMEDY)


def _sweep() -> None:
    """Remove the folders of killed builds; there is no other build while the lock is held."""
    for room in cache_folder().glob(f"{_PREFIX}*"):
        shutil.rmtree(room, ignore_errors=True)
