"""``python -m scripts.differences``: writes the list of differences from torchrun in docs/agent.md.

Each sentence is the argument of a ``@pytest.mark.differs`` on a test that runs both launchers.
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "agent.md"
INTRODUCTION = "Tests that run both launchers show these differences:\n\n"
WIDTH = 133


def sentences() -> list[str]:
    """Return the sentences of all marks, by file and line."""
    calls = [
        node
        for file in sorted(ROOT.glob("tests/integration/test_compat_*.py"))
        for node in sorted(_calls(file), key=lambda node: node.lineno)
    ]
    return [ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "pytest.mark.differs"]


def updated(page: str) -> str:
    """Return the page with the current list, which is at its end."""
    items = (
        textwrap.fill(f"- {each}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for each in sentences()
    )
    return page.partition(INTRODUCTION)[0] + INTRODUCTION + "\n".join(items) + "\n"


def _calls(file: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
    print(PAGE.relative_to(ROOT))
