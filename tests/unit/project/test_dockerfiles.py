"""The Dockerfiles, without building them; tests/kubernetes/test_images.py builds them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
AGENT = ROOT / "Dockerfile.agent"
OPERATOR = ROOT / "Dockerfile.operator"
both = pytest.mark.parametrize("dockerfile", [AGENT, OPERATOR], ids=lambda path: path.name)

Instruction = tuple[str, str]


def instructions(dockerfile: Path) -> list[Instruction]:
    """Return the instructions of a Dockerfile, with continued lines joined."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(first, rest) for first, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def stage(dockerfile: Path, name: str = "") -> list[Instruction]:
    """Return the instructions of a stage and of its base stages; the stage without a name is the image."""
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
def test_pip_installs_pinned_versions(dockerfile: Path) -> None:
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


def test_the_torch_layer_is_below_the_layers_of_the_code() -> None:
    found = stage(AGENT)
    torch = position(found, "RUN", " torch")
    assert found[torch][1].rstrip().endswith(" torch")  # in a layer of its own
    assert torch < position(found, "COPY", "--from=project") < position(found, "COPY", "examples")
    before = [rest for instruction, rest in found[:torch] if instruction == "COPY"]
    assert before == ["constraints.txt /opt/elastic-agent/"]


def test_the_documentation_names_files_of_the_image() -> None:
    manual = (ROOT / "docs" / "own-image.md").read_text()
    assert {match.split("/")[-1] for match in re.findall(r"/opt/elastic-agent/\S+", manual)} == {
        "*.whl",
        "constraints.txt",
    }
    assert "COPY constraints.txt /opt/elastic-agent/" in AGENT.read_text()
    assert "--wheel-dir /installed/opt/elastic-agent" in AGENT.read_text()
