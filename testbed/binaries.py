"""The programs of the test bed that are written in Go, such as Kubernetes; they are built once.

No program is downloaded. ``go/`` beside this file has one module for each project (go.mod names the version,
go.sum its hash), and Go builds the programs from their sources, into the user's cache folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from testbed.cache import Missing, cache_folder, locked

if TYPE_CHECKING:
    from collections.abc import Mapping

GO_MODULES: Final = Path(__file__).parent / "go"
OLDEST_GO: Final = "1.26"
DEFAULT_GO_BIN: Final = "/usr/local/go/bin"
"""The default folder of Go's programs. It is not on the PATH of sudo."""


@dataclass(frozen=True, kw_only=True)
class Project:
    """Programs that are built together.

    Attributes:
        name: the name of the project's folder below ``go/``.
        module: the Go module of the programs.
        packages: the package of each program, by the program's name.
        variables: the variables that the linker sets; {version} is the module's version, such as v1.36.3.
    """

    name: str
    module: str
    packages: Mapping[str, str]
    variables: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """The folder of its go.mod."""
        return GO_MODULES / self.name

    @property
    def version(self) -> str:
        """The module's version as in go.mod, which begins with a v."""
        found = re.search(
            rf"^require {re.escape(self.module)} (v\S+)$", (self.folder / "go.mod").read_text(), re.MULTILINE
        )
        if found is None:
            raise ValueError(f"{self.folder}/go.mod has no line `require {self.module} v…`")
        return found[1]


_KUBERNETES_VERSION = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")

PROJECTS: Final = (
    Project(
        name="kubernetes",
        module="k8s.io/kubernetes",
        packages={
            name: f"k8s.io/kubernetes/cmd/{name}"
            for name in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubectl",
                "kubelet",
                "kube-proxy",
            )
        },
        variables={
            f"{package}.{name}": value
            for package in _KUBERNETES_VERSION
            for name, value in {
                "gitVersion": "{version}",
                "gitMajor": "{major}",
                "gitMinor": "{minor}",
                "gitTreeState": "clean",
            }.items()
        },
    ),
    Project(
        name="etcd",
        module="go.etcd.io/etcd/server/v3",
        packages={"etcd": "go.etcd.io/etcd/server/v3"},
        variables={},
    ),
    # go.mod names this release, v3.4.14, by the pseudo-version of its commit.
    Project(
        name="etcd34",
        module="go.etcd.io/etcd",
        packages={"etcd-3.4": "go.etcd.io/etcd"},
        variables={},
    ),
    Project(
        name="helm",
        module="helm.sh/helm/v3",
        packages={"helm": "helm.sh/helm/v3/cmd/helm"},
        # `helm template` and `helm lint` compare a chart's kubeVersion with these; their default is 1.20.
        variables={
            "helm.sh/helm/v3/internal/version.version": "{version}",
            **{
                f"helm.sh/helm/v3/pkg/{package}.k8sVersion{part}": value
                for package in ("chartutil", "lint/rules")
                for part, value in {"Major": "1", "Minor": "37"}.items()
            },
        },
    ),
    Project(
        name="coredns",
        module="github.com/coredns/coredns",
        packages={"coredns": "github.com/coredns/coredns"},
        variables={},
    ),
    Project(
        name="kwok",
        module="sigs.k8s.io/kwok",
        packages={"kwok": "sigs.k8s.io/kwok/cmd/kwok"},
        variables={},
    ),
    Project(
        name="kube-router",
        module="github.com/cloudnativelabs/kube-router/v2",
        packages={"kube-router": "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"},
        variables={},
    ),
)


@cache
def binary(name: str) -> Path:
    """Return the path of a program in the cache; build the program if it is missing.

    Args:
        name: the program, such as kube-apiserver, kubectl, kubelet, etcd, helm, coredns, kwok, kube-router.

    Raises:
        Missing: the program does not exist and cannot be built.
    """
    project = project_of(name)
    folder = built_folder(project)
    if not (folder / name).exists():
        with locked(f"bin-{project.name}"):
            if not (folder / name).exists():
                _build(project, folder)
    return folder / name


def project_of(name: str) -> Project:
    """Return the project of a program."""
    return next(project for project in PROJECTS if name in project.packages)


def is_ready(name: str) -> bool:
    """Return whether :func:`binary` will find the program without building it."""
    return (built_folder(project_of(name)) / name).exists()


def built_folder(project: Project) -> Path:
    """Return the folder of a project's programs; it depends on the version and the build settings."""
    inputs = [(project.folder / file).read_bytes() for file in ("go.mod", "go.sum")]
    inputs += [" ".join(linker_flags(project)).encode(), *(package.encode() for package in project.packages.values())]
    digest = hashlib.sha256(b"\0".join(inputs)).hexdigest()[:8]
    return cache_folder() / "bin" / f"{project.name}-{project.version}-{digest}"


def _build(project: Project, folder: Path) -> None:
    """Build a project's programs. The folder is created only after all programs are built."""
    go = compiler(project)
    programs = ", ".join(project.packages)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f".{project.name}-*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as unfinished:
        out = Path(unfinished) / "out"
        out.mkdir()
        target = f"{out}/" if len(project.packages) > 1 else str(out / next(iter(project.packages)))
        command = [go, "build", "-mod=readonly", "-trimpath", "-buildvcs=false"]
        command += ["-ldflags", " ".join(linker_flags(project)), "-o", target, *project.packages.values()]
        done = subprocess.run(command, cwd=project.folder, env=_environ(), capture_output=True, text=True, check=False)
        if done.returncode:
            output = "\n".join(done.stderr.splitlines()[-20:])
            raise Missing(
                f"{programs} {project.version}",
                "Go could not build them. The first build needs access to Go's module proxy, 5 GB of free space in "
                "the cache folder, and 3 GB in the folder that `go env GOMODCACHE` prints. Output of `go build`:\n"
                f"{output}",
            )
        if folder.exists():  # from an incomplete build
            shutil.rmtree(folder)
        out.rename(folder)


def compiler(project: Project) -> str:
    """Return the Go command that can build the project.

    Raises:
        Missing: there is no recent Go.
    """
    wanted = f"Go {OLDEST_GO} or later"
    go = shutil.which("go") or shutil.which("go", path=DEFAULT_GO_BIN)
    if go is None:
        raise Missing(wanted, f"install it (https://go.dev/dl/) so that `go` is on the PATH; it builds {project.name}")
    # Run in the module's folder, because Go then uses, and may download, the version that go.mod requires.
    asked = subprocess.run(
        [go, "env", "GOVERSION"], cwd=project.folder, env=_environ(), capture_output=True, text=True, check=False
    )
    found = re.match(r"go(\d+)\.(\d+)", asked.stdout)
    if found is None or tuple(map(int, found.groups())) < tuple(map(int, OLDEST_GO.split("."))):
        version = asked.stdout.strip() or asked.stderr.strip()
        raise Missing(wanted, f"{go} is too old ({version}); install a newer one (https://go.dev/dl/)")
    return go


def linker_flags(project: Project) -> list[str]:
    """Return the linker's flags, which omit debug information and set the version."""
    major, minor = project.version.removeprefix("v").split(".")[:2]
    values = {"version": project.version, "major": major, "minor": minor}
    return ["-s", "-w", *(f"-X={name}={value.format(**values)}" for name, value in project.variables.items())]


def _environ() -> dict[str, str]:
    """Return Go's environment for static programs for this machine."""
    dropped = {"GOOS", "GOARCH", "GOWORK", "GO111MODULE"}
    return {name: value for name, value in os.environ.items() if name not in dropped} | {
        "CGO_ENABLED": "0",
        "GOWORK": "off",
        "GOCACHE": str(_build_cache()),
    }


def _build_cache() -> Path:
    """Return Go's build cache: GOCACHE if it is set, otherwise a folder that is removed after the builds."""
    return Path(os.environ.get("GOCACHE") or cache_folder() / "go-build")


def remove_build_cache() -> None:
    """Remove Go's build cache from the cache folder: several GB that only builds need."""
    shutil.rmtree(cache_folder() / "go-build", ignore_errors=True)
