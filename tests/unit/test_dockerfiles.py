"""The Dockerfiles, as far as they can be judged without building them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.testbed import image_base

ROOT = Path(__file__).resolve().parents[2]
AGENT = ROOT / "Dockerfile.agent"
OPERATOR = ROOT / "Dockerfile.operator"
both = pytest.mark.parametrize("dockerfile", [AGENT, OPERATOR], ids=lambda path: path.name)

Instruction = tuple[str, str]


def instructions(dockerfile: Path) -> list[Instruction]:
    """What a Dockerfile says, each instruction with its arguments on one line."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(first, rest) for first, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def stage(dockerfile: Path, name: str = "") -> list[Instruction]:
    """One stage of a Dockerfile, with all that it starts from; without a name the last one: the image itself."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for instruction, rest in instructions(dockerfile):
        if instruction == "FROM":
            base, _, name_here = rest.partition(" AS ")
            current = found[name_here] = [*found.get(base, [])]
        current.append((instruction, rest))
    return found[name]


def position(found: list[Instruction], instruction: str, text: str) -> int:
    (number,) = [number for number, (first, rest) in enumerate(found) if first == instruction and text in rest]
    return number


@both
def test_the_user_is_a_number_other_than_roots(dockerfile: Path) -> None:
    users = [rest for instruction, rest in stage(dockerfile) if instruction == "USER"]
    assert users
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])


@both
def test_an_image_starts_from_the_base_that_the_test_bed_makes(dockerfile: Path) -> None:
    ((_, base),) = [each for each in instructions(dockerfile) if each[0] == "ARG" and each[1].startswith("BASE=")]
    assert f"docker.io/library/{base.removeprefix('BASE=')}" == image_base.NAME
    stages = [rest for instruction, rest in instructions(dockerfile) if instruction == "FROM"]
    names = {rest.partition(" AS ")[2] for rest in stages}
    assert {rest.partition(" AS ")[0] for rest in stages} <= {"${BASE}"} | names


@both
def test_what_pip_installs_is_pinned(dockerfile: Path) -> None:
    installs = [
        command
        for instruction, rest in instructions(dockerfile)
        if instruction == "RUN"
        for command in rest.split("&&")
        if re.search(r"pip\S*( --python \S+)? install", command)
    ]
    assert len(installs) > 2
    for command in installs:
        assert re.search(r"--constraint \S*constraints.txt", command) or "--no-deps" in command, command


@both
def test_nothing_needs_more_than_the_plain_builder(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert "--mount" not in text
    assert "<<" not in text
    assert "# syntax" not in text


@both
def test_lists_and_caches_of_packages_do_not_stay(dockerfile: Path) -> None:
    assert "PIP_NO_CACHE_DIR=1" in dockerfile.read_text()
    stages = re.split(r"^FROM ", dockerfile.read_text(), flags=re.MULTILINE)[1:]
    base = next(text for text in stages if " AS python" in text)
    assert re.search(r"apt-get install .*?rm -rf /var/lib/apt/lists/\*", base, re.DOTALL)


@both
def test_what_is_copied_is_there_and_not_ignored(dockerfile: Path) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source
        for instruction, rest in instructions(dockerfile)
        if instruction == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert copied
    assert copied <= allowed
    assert all((ROOT / source).exists() for source in allowed)


def test_torch_lies_below_all_that_changes_with_the_code() -> None:
    found = stage(AGENT)
    torch = position(found, "RUN", " torch")
    assert found[torch][1].rstrip().endswith(" torch")  # in a layer of its own
    assert torch < position(found, "COPY", "--from=project") < position(found, "COPY", "examples")
    before = [rest for instruction, rest in found[:torch] if instruction == "COPY"]
    assert before == ["constraints.txt /opt/elastic-agent/"]


def test_the_operators_image_gets_no_more_than_its_extra() -> None:
    text = OPERATOR.read_text()
    assert '["optional-dependencies"]["operator"]' in text
    assert "torch" not in re.sub(r"#.*", "", text)
    assert [rest for instruction, rest in stage(OPERATOR) if instruction == "COPY"] == [
        "--from=dependencies /opt/venv /opt/venv",
        "--from=project /installed/ /",
    ]


def test_the_programs_are_those_that_the_project_installs() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for dockerfile, program in ((AGENT, "torchelastic-run"), (OPERATOR, "elastic-operator")):
        assert ("ENTRYPOINT", f'["{program}"]') in stage(dockerfile)
        assert program in scripts


def test_the_example_finds_its_program_in_the_image_that_it_names() -> None:
    spec = yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text())["spec"]
    assert spec["image"] in AGENT.read_text()
    (folder,) = [rest for instruction, rest in stage(AGENT) if instruction == "WORKDIR"]
    assert ("COPY", f"examples {folder}") in stage(AGENT)
    assert (ROOT / "examples" / spec["args"][0]).is_file()


def test_the_manual_names_files_that_the_image_has() -> None:
    manual = (ROOT / "docs" / "own-image.md").read_text()
    assert {match.split("/")[-1] for match in re.findall(r"/opt/elastic-agent/\S+", manual)} == {
        "*.whl",
        "constraints.txt",
    }
    assert "COPY constraints.txt /opt/elastic-agent/" in AGENT.read_text()
    assert "--wheel-dir /installed/opt/elastic-agent" in AGENT.read_text()
