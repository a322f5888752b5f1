"""Empty libraries and packages that replace those of CUDA, which take gigabytes and are useless without a GPU.

The dynamic linker accepts libraries that define the symbols that torch uses. Everything else of torch is as released.
CUDA's runtime and its profiling interface stay, because torch calls them while it is imported.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import platform
import re
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from testbed.cache import Missing

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION: Final = "1"
"""The version of the stubs; images are rebuilt when the version changes."""

_LIBRARIES: Final = re.compile(r"\[(lib(?:cu|nccl|nv)[A-Za-z_]*\.so\.\d+)\]")
_REAL: Final = re.compile(r"lib(?:cudart|cupti|cuda)\.so\.\d+")
_VERSION: Final = re.compile(r"File: (\S+)\s+Cnt: 1\n\s+\S+:\s+Name: (\S+)")
"""Matches a library with versioned symbols, and their version."""
_SYMBOL: Final = re.compile(r"nccl|nvshmem|cu")
_PACKAGES: Final = re.compile(r"^((?:nvidia-(?!cuda-runtime|cuda-cupti|ml-py)|triton)[\w-]*)==(\S+)$", re.MULTILINE)


def write_libraries(torchs: Path, target: Path) -> None:
    """Write a stub for each CUDA library that torch needs on x86-64; on other machines torch needs none.

    Args:
        torchs: the folder with torch's own libraries.
        target: the folder that gets the stubs.

    Raises:
        Missing: there is no C compiler.
    """
    if platform.machine() != "x86_64":
        return
    for tool in ("cc", "nm", "readelf"):
        if shutil.which(tool) is None:
            raise Missing(f"`{tool}`, for the stubs of CUDA's libraries", "install a C compiler, such as Debian's gcc")
    files = [str(path) for path in torchs.glob("lib*.so")]
    symbols: dict[str, set[str]] = {"": set()}
    for symbol in re.findall(r"^\s+[Uw] (\S+)$", _output("nm", "-D", "--undefined-only", *files), re.MULTILINE):
        name, _, version = symbol.partition("@")
        if version or _SYMBOL.match(name):
            symbols.setdefault(version.removeprefix("@"), set()).add(name)
    versions = dict(_VERSION.findall(_output("readelf", "-VW", *files)))
    needed = {name for name in _LIBRARIES.findall(_output("readelf", "-d", *files)) if not _REAL.fullmatch(name)}
    for library in sorted(needed):
        version = versions.get(library, "")
        _write_library(target / library, version, symbols.get(version, set()))


def write_packages(constraints: Path, target: Path) -> None:
    """Write wheels that pip prefers to CUDA's packages of the same versions; that of cuBLAS contains the stubs.

    Args:
        constraints: the file that pins the versions.
        target: the folder that gets the wheels.

    Raises:
        Missing: there is no C compiler.
    """
    torch = importlib.util.find_spec("torch")
    if platform.machine() != "x86_64" or torch is None or torch.origin is None:
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_libraries(Path(torch.origin).parent / "lib", Path(scratch))
        libraries = {f"torch/lib/{path.name}": path.read_bytes() for path in sorted(Path(scratch).iterdir())}
    for name, version in _PACKAGES.findall(constraints.read_text()):
        _write_wheel(target, name, f"{version}+stub", libraries if name == "nvidia-cublas" else {})


def _write_library(path: Path, version: str, symbols: set[str]) -> None:
    """Write a library that defines these symbols, with one version or without."""
    with tempfile.TemporaryDirectory() as scratch:
        source, versions = Path(scratch, "empty.s"), Path(scratch, "versions")
        labels = "".join(f".globl {name}\n.type {name},@function\n{name}:\n" for name in sorted(symbols))
        source.write_text(f'.text\n{labels}ud2\n.section .note.GNU-stack,"",@progbits\n')
        versions.write_text(f"{version} {{ global: *; }};\n")
        script = [f"-Wl,--version-script={versions}"] if version else []
        _output("cc", "-shared", "-nostdlib", f"-Wl,-soname,{path.name}", *script, "-o", str(path), str(source))


def _write_wheel(folder: Path, name: str, version: str, files: Mapping[str, bytes]) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    contents = {
        **files,
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: stub\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in contents.items())
    contents[f"{stem}.dist-info/RECORD"] = f"{record}{stem}.dist-info/RECORD,,\n".encode()
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, data in contents.items():
            wheel.writestr(zipfile.ZipInfo(path), data)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
