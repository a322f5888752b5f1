"""What of a node of the test bed can be told without one: its control groups, its configuration, its images."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path

import pytest

from tests.support.testbed import node_cgroups, node_config, node_machine
from tests.support.testbed.cache import Missing
from tests.support.testbed.installation import Site
from tests.support.testbed.node_cgroups import Groups, Hierarchy
from tests.support.testbed.node_images import Archive, Kept, full_name, inspected, listed

# ---- control groups


def test_version_1_has_a_hierarchy_for_each_line() -> None:
    mounts = """\
30 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
32 30 0:30 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
33 30 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,release_agent=/usr/lib/agent,name=systemd
34 30 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
    groups = "4:memory:/user/me\n3:cpuacct,cpu:/\n1:name=systemd:/user.slice\n0::/user.slice\n"
    top = Path("/sys/fs/cgroup")
    assert node_cgroups.hierarchies(mounts, groups) == [
        Hierarchy(mount=top / "cpu,cpuacct", own=top / "cpu,cpuacct", options="cpu,cpuacct"),
        Hierarchy(mount=top / "memory", own=top / "memory/user/me", options="memory"),
        Hierarchy(mount=top / "systemd", own=top / "systemd/user.slice", options="none,name=systemd"),
    ]


def test_version_2_is_one_hierarchy() -> None:
    mounts = "30 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
    top = Path("/sys/fs/cgroup")
    (found,) = node_cgroups.hierarchies(mounts, "0::/user.slice/user-0.slice/session-1.scope\n")
    assert found == Hierarchy(mount=top, own=top / "user.slice/user-0.slice/session-1.scope", options="")
    assert found.version == 2


def test_what_is_mounted_from_a_group_on_shows_that_group_at_the_top() -> None:
    mounts = "32 30 0:30 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    for group, own in (("/docker/abc", ""), ("/docker/abc/inner", "inner"), ("/elsewhere", "")):
        (found,) = node_cgroups.hierarchies(mounts, f"4:memory:{group}\n")
        assert found.own == Path("/sys/fs/cgroup/memory", own)


def test_a_mount_whose_name_has_a_blank() -> None:
    (found,) = node_cgroups.hierarchies("32 30 0:30 / /my\\040groups rw - cgroup2 none rw\n", "0::/\n")
    assert found.mount == Path("/my groups")


def test_version_2_is_used_from_the_top_and_given_what_it_lacks(tmp_path: Path) -> None:
    write(tmp_path, **{"cgroup.controllers": "cpuset cpu io memory pids", "cgroup.subtree_control": "memory pids\n"})
    hierarchy = Hierarchy(mount=tmp_path, own=tmp_path / "user.slice", options="")
    node_cgroups.check([hierarchy])
    assert node_cgroups.plan([hierarchy], "node") == Groups(folders=(str(tmp_path / "node"),), enabled=("cpu",))


def test_version_1_is_used_from_ones_own_group_on() -> None:
    hierarchies = [Hierarchy(mount=Path("/c", name), own=Path("/c", name, "me"), options=name) for name in ("a", "b")]
    assert node_cgroups.plan(hierarchies, "node") == Groups(folders=("/c/a/me/node", "/c/b/me/node"))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"cgroup.controllers": "memory pids"}, "controllers cpu:"),
        (
            {"cgroup.controllers": "cpu memory pids", "cgroup.type": "domain", "cgroup.procs": "1\n"},
            "on the machine itself",
        ),
    ],
)
def test_what_version_2_lacks_is_said(tmp_path: Path, files: dict[str, str], words: str) -> None:
    write(tmp_path, **files)
    with pytest.raises(Missing, match=words):
        node_cgroups.check([Hierarchy(mount=tmp_path, own=tmp_path, options="")])


def test_what_version_1_lacks_is_said(tmp_path: Path) -> None:
    have = sorted(node_cgroups.NEEDED_V1 - {"pids"})
    with pytest.raises(Missing, match="controllers pids:"):
        node_cgroups.check([Hierarchy(mount=tmp_path, own=tmp_path, options=name) for name in have])
    with pytest.raises(Missing, match="mount them"):
        node_cgroups.check([])


def test_what_is_written_of_groups_is_read_again() -> None:
    groups = Groups(folders=("/a", "/b"), enabled=("cpu",))
    assert node_cgroups.read(node_cgroups.written(groups)) == groups


# ---- the machine


def test_a_right_that_root_does_not_have_is_named() -> None:
    assert node_machine.lacking_rights("Name:\tx\nCapEff:\t000001ffffffffff\nCapBnd:\t0\n") == []
    assert node_machine.lacking_rights("CapEff:\t00000000a80435fb\n") == ["CAP_SYS_ADMIN"]
    assert node_machine.lacking_rights("CapEff:\t00000000a80425fb\n") == ["CAP_NET_ADMIN", "CAP_SYS_ADMIN"]


def test_the_file_system_of_a_folder_is_that_of_the_innermost_mount() -> None:
    mounts = """\
23 1 0:21 / / rw - overlay overlay rw,lowerdir=/a
24 23 0:22 / /home rw shared:3 - ext4 /dev/vda rw
25 23 0:23 / /home/me/my\\040cache rw - xfs /dev/vdb rw
26 23 0:24 / /homes rw - nfs server:/ rw
"""
    kinds = {"/": "overlay", "/root/.cache": "overlay", "/home/me": "ext4", "/home/me/my cache/node": "xfs"}
    assert {path: node_machine.file_system(Path(path), mounts) for path in kinds} == kinds


# ---- configuration


@pytest.fixture
def site() -> Site:
    return Site(folder=Path("/folder"), port=6443, etcd_port=2379, peer_port=2380, token="secret")


def test_no_file_names_a_place_outside_of_the_node(site: Site) -> None:
    for name, text in node_config.files(site, Path("/tools"), "localhost/pause:1").items():
        for path in re.findall(r'(?<=["=\s])(?:unix://)?(/\w[\w/.-]*)', text):
            assert path.startswith(("/folder/", "/tools/", "/run/")), f"{name}: {path}"


def test_files_in_json_are_json(site: Site) -> None:
    files = node_config.files(site, Path("/tools"), "localhost/pause:1")
    kinds = {json.loads(text).get("kind") for name, text in files.items() if name.endswith(".json")}
    assert kinds == {"Policy", "KubeletConfiguration", "KubeProxyConfiguration"}


def test_a_bed_that_was_written_is_read_again() -> None:
    bed = node_config.Bed(
        folder="/folder", cache="/cache", shown=["/cache"], tools="/tools", commands={"etcd": ["etcd"]},
        server="https://10.88.255.1:6443", token="secret", authority="/folder/pki/ca.crt",
    )  # fmt: skip
    assert node_config.Bed.read(bed.written()) == bed


def test_no_proxy_is_asked_for_what_is_inside() -> None:
    environ = {"PATH": "/bin", "https_proxy": "http://proxy", "HTTP_PROXY": "http://proxy", "no_proxy": "localhost"}
    assert node_config.without_proxies(environ) == {"PATH": "/bin"}


# ---- images


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("busybox", "docker.io/library/busybox:latest"),
        ("elastic-agent:dev", "docker.io/library/elastic-agent:dev"),
        ("me/image:1", "docker.io/me/image:1"),
        ("localhost/pause:1", "localhost/pause:1"),
        ("quay.io/coreos/etcd:v3.7.3", "quay.io/coreos/etcd:v3.7.3"),
        ("registry:5000/image", "registry:5000/image:latest"),
        ("localhost:5000/image:1", "localhost:5000/image:1"),
        ("quay.io/image@sha256:abc", "quay.io/image@sha256:abc"),
    ],
)
def test_the_full_name_of_an_image(name: str, full: str) -> None:
    assert full_name(name) == full


def test_an_oci_archive_is_known_by_its_index(tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    seen = []
    for digest in ("sha256:1", "sha256:2"):
        manifest = {"digest": digest, "annotations": {"org.opencontainers.image.ref.name": "elastic-agent:dev"}}
        pack(path, {"index.json": {"manifests": [manifest]}})
        seen.append(inspected(path))
    assert {archive.names for archive in seen} == {("docker.io/library/elastic-agent:dev",)}
    assert seen[0].identity != seen[1].identity
    assert inspected(path) == seen[1]


def test_a_docker_archive_is_known_by_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    seen = []
    for layer in ("sha256:1", "sha256:2"):
        manifest = [{"Config": "config.json", "RepoTags": ["localhost/pause:1"]}]
        pack(path, {"manifest.json": manifest, "config.json": {"rootfs": {"diff_ids": [layer]}}})
        seen.append(inspected(path))
    assert {archive.names for archive in seen} == {("localhost/pause:1",)}
    assert seen[0].identity != seen[1].identity


def test_an_archive_without_a_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    pack(path, {"index.json": {"manifests": [{"digest": "sha256:1"}]}})
    with pytest.raises(ValueError, match="holds no image that has a name"):
        inspected(path)


def test_images_are_listed_with_their_digests() -> None:
    table = """\
REF               TYPE                                       DIGEST   SIZE     PLATFORMS   LABELS
localhost/pause:1 application/vnd.oci.image.manifest.v1+json sha256:1 10.6 KiB linux/amd64 a=b
sha256:c          application/vnd.oci.image.manifest.v1+json sha256:1 10.6 KiB linux/amd64 a=b
"""
    assert listed(table) == {"localhost/pause:1": "sha256:1", "sha256:c": "sha256:1"}


class TestKept:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return tmp_path / "images.json"

    def archive(self, path: Path, identity: str, *names: str) -> Archive:
        path.touch()
        return Archive(path=path, identity=identity, names=names)

    def test_what_was_imported_is_there_for_the_next_run(self, file: Path, tmp_path: Path) -> None:
        archive = self.archive(tmp_path / "a", "1", "a:1")
        there = {"a:1": "sha256:1"}
        assert not Kept(file).has(archive, there)
        Kept(file).add(archive, there)
        assert Kept(file).has(archive, there)

    def test_what_has_been_removed_or_replaced_since_is_not(self, file: Path, tmp_path: Path) -> None:
        archive = self.archive(tmp_path / "a", "1", "a:1")
        Kept(file).add(archive, {"a:1": "sha256:1"})
        assert not Kept(file).has(archive, {})
        assert not Kept(file).has(archive, {"a:1": "sha256:2"})

    def test_an_archive_made_anew_replaces_what_it_held(self, file: Path, tmp_path: Path) -> None:
        kept = Kept(file)
        kept.add(self.archive(tmp_path / "a", "1", "a:1"), {"a:1": "sha256:1"})
        kept.add(self.archive(tmp_path / "a", "2", "a:2"), {"a:2": "sha256:2"})
        assert kept.unwanted({"a:1": "sha256:1", "a:2": "sha256:2", "sha256:c": "sha256:1"}) == ["a:1", "sha256:c"]

    def test_an_image_goes_with_its_archive_when_the_next_comes(self, file: Path, tmp_path: Path) -> None:
        kept = Kept(file)
        old = self.archive(tmp_path / "old", "1", "a:1")
        kept.add(old, {"a:1": "sha256:1"})
        assert kept.unwanted({"a:1": "sha256:1"}) == []
        old.path.unlink()
        kept.add(self.archive(tmp_path / "new", "2", "b:1"), {"b:1": "sha256:2"})
        assert kept.unwanted({"a:1": "sha256:1", "b:1": "sha256:2"}) == ["a:1"]


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


def pack(path: Path, files: dict[str, object]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            text = json.dumps(content).encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
