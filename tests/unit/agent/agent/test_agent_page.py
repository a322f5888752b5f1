"""docs/agent.md lists exactly the existing flags, keys, variables and exit codes, with their defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import differences
from torchelastic.config import flags
from torchelastic.config.settings import AgentSettings, RendezvousSettings
from torchelastic.protocol.pod import ExitCode
from torchelastic.protocol.records import Member, RoundRecord, SizeRecord
from torchelastic.rendezvous.node import worker_environments
from torchelastic.rendezvous.policy.plan import LAST_CALL
from torchelastic.training import notices

PAGE = (Path(__file__).parents[4] / "docs" / "agent.md").read_text()

FLAGS = {flag.name: flag for group in flags.FLAGS.values() for flag in group}


def rows(heading: str) -> dict[str, list[str]]:
    """Return the other cells of the table rows below a heading, by the names in the first cell."""
    section = re.split(r"^#+ ", PAGE.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    found = {}
    for line in section.splitlines():
        if line.startswith("|"):
            first, *others = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            found.update(dict.fromkeys(re.findall(r"\w[\w-]*", first), others))
    return found


def test_the_tables_list_exactly_the_existing_flags() -> None:
    named = set(re.findall(r"`(?:-\w`, `)?--([a-z-]+)", "\n".join(re.findall(r"^\| `-.*", PAGE, re.MULTILINE))))
    assert named == FLAGS.keys()
    for flag in FLAGS.values():
        assert not flag.short or f"`-{flag.short}`, `--{flag.name}" in PAGE


def test_the_text_mentions_only_existing_flags() -> None:
    own = PAGE.replace("`--enable-v2`", "").partition("## What differs from torchrun\n")[0]  # without flags of others
    own = re.sub(r"## Debuggers and profilers\n.*?\n## ", "", own, flags=re.DOTALL)
    assert set(re.findall(r"--([a-z][a-z-]+)", own)) <= FLAGS.keys()


@pytest.mark.parametrize(
    ("flag", "default"),
    [
        ("max-restarts", RendezvousSettings.__dataclass_fields__["max_restarts"].default),
        ("notice", RendezvousSettings.__dataclass_fields__["notice"].default),
        ("stop-timeout", AgentSettings.__dataclass_fields__["stop_timeout"].default),
        ("rejoin-timeout", AgentSettings.__dataclass_fields__["rejoin_timeout"].default),
        ("shutdown-timeout", AgentSettings.__dataclass_fields__["shutdown_timeout"].default),
        ("role", AgentSettings.__dataclass_fields__["role"].default),
    ],
)
def test_the_defaults_match_the_settings(flag: str, default: float | str) -> None:
    shown = default if isinstance(default, str) else f"{default:g}"
    assert rows("Flags")[flag][0] == f"`{shown}`"
    assert f"Default: {shown}" in FLAGS[flag].help or flag == "max-restarts"


def test_the_table_of_rdzv_conf_lists_every_key_with_its_default() -> None:
    table = rows("--rdzv-conf")
    assert table.keys() - {"also"} == {*flags.CONF, *flags.CONF_ALIASES}
    fields = RendezvousSettings.__dataclass_fields__
    defaults = {key: fields[key].default for key in flags.CONF.keys() & fields.keys()} | {
        "last_call_timeout": LAST_CALL
    }
    for key, default in defaults.items():
        assert f"`{default:g}`" in table[key][0].split(", "), key


def test_every_worker_variable_is_listed() -> None:
    round = RoundRecord(number=1, members=(Member("a.1", "10.0.0.1", 1),), tcp_store="10.0.0.1:1")
    [environment] = worker_environments(round, "a.1", role="default", run_id="x", max_restarts=1)
    assert environment.keys() <= rows("Environment of a worker").keys()


def test_every_function_for_programs_is_listed() -> None:
    calls = rows("What your program has to do")
    assert {
        "NonRetryableException",
        "ask_for_notice",
        "heartbeat",
        "notice",
        "is_round_current",
        "answer_notice",
    } <= calls.keys()
    shown = set(re.findall(r"`(\w+)`", calls["notice"][0]))
    assert {*notices.Notice.__dataclass_fields__, "seconds_left"} <= shown


def test_every_exit_code_is_listed() -> None:
    codes = {name for name in rows("Exit codes") if name.isdecimal()}
    assert codes == {str(code.value) for code in ExitCode}


def test_the_differences_from_torchrun_are_those_of_the_tests() -> None:
    assert differences.updated(PAGE) == PAGE, "run `python -m scripts.differences`"


def test_the_readme_links_to_the_page_and_its_anchors_exist() -> None:
    assert "](docs/agent.md)" in (Path(__file__).parents[4] / "README.md").read_text()
    headings = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGE)) <= anchors


def test_every_example_of_nnodes_is_valid() -> None:
    for text in re.findall(r"--nnodes ([0-9:]+)", PAGE):
        assert isinstance(flags.read(["--nnodes", text, "x.py"], {}).values["nnodes"], SizeRecord)
