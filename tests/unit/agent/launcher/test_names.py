"""The names of torchrunx for logs, command lines and Lightning."""

from __future__ import annotations

import argparse
import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import torchelastic.launcher as trx
from torchelastic.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path


def record(hostname: str, local_rank: int | None, level: int = logging.INFO, text: str = "text") -> logging.LogRecord:
    made = logging.LogRecord("mine", level, "", 0, text, None, None)
    made.hostname, made.local_rank = hostname, local_rank
    return made


def parsed(*arguments: str) -> trx.Launcher:
    parser = argparse.ArgumentParser()
    trx.add_torchrunx_argument_group(parser)
    return trx.launcher_from_args(parser.parse_args(arguments))


def test_the_options_of_a_parser_make_a_launcher() -> None:
    assert parsed("--hostnames", "a", "b", "--workers-per-host", "2", "3", "--backend", "None") == trx.Launcher(
        ["a", "b"], [2, 3], backend=None, extra_env_vars={}
    )
    launcher = parsed("--workers-per-host", "gpu", "--worker-timeout", "5", "--extra-env-vars", "A=b=c", "D=")
    assert (launcher.workers_per_host, launcher.timeout) == ("gpu", 5)
    assert launcher.extra_env_vars == {"A": "b=c", "D": ""}
    assert launcher.default_env_vars == trx.DEFAULT_ENV_VARS_FOR_COPY
    with pytest.raises(SettingsError, match=r"^--extra-env-vars contains 'A': it must be NAME=VALUE\.$"):
        parsed("--extra-env-vars", "A")
    with pytest.raises(RuntimeError, match="no SLURM allocation"):
        parsed("--hostnames", "slurm").run(print)


def test_a_filter_takes_the_lines_of_one_worker() -> None:
    selects = trx.get_handler_filter("a", None, logging.WARNING)
    assert selects(record("a", None, logging.ERROR))
    assert not any(map(selects, (record("a", 0, logging.ERROR), record("a", None), record("b", None, logging.ERROR))))


def test_lines_are_redirected_to_loggers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "torchrunx.a.1")
    caplog.set_level(logging.INFO, "torchrunx")
    for each in (record("a", 1, text="no"), record("a", 0, text="worker"), record("a", None, text="agent")):
        trx.RedirectHandler().handle(each)
    assert caplog.messages == ["worker", "agent"]


def test_files_have_the_lines_of_these_hosts(tmp_path: Path) -> None:
    [handler] = trx.file_handlers(["a"], [1], tmp_path / "logs", logging.INFO)
    for each in (record("a", 0), record("a", 1), record("b", 0), record("a", None)):
        handler.handle(each)
    handler.close()
    assert handler.level == logging.INFO
    assert sorted(path.name.rpartition("-a-")[2] for path in (tmp_path / "logs").iterdir()) == ["0.log", "agent.log"]


def test_a_variable_has_the_level_of_the_log_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRUNX_LOG_DIR", f"{tmp_path}")
    for text, level in (("warning", logging.WARNING), ("15", 15), ("", logging.NOTSET)):
        monkeypatch.setenv("TORCHRUNX_LOG_LEVEL", text)
        assert trx.default_handlers(["a"], [1])[0].level == level
    monkeypatch.setenv("TORCHRUNX_LOG_LEVEL", "LOUD")
    with pytest.raises(SettingsError, match=r"^TORCHRUNX_LOG_LEVEL is 'LOUD': it must be a level"):
        trx.default_handlers(["a"])


def test_lightning_finds_the_ranks_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchelastic.launcher.lightning", raising=False)
    for name in ("lightning", "lightning_fabric"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="needs PyTorch Lightning: pip install lightning"):
        _ = trx.TorchrunxClusterEnvironment
    names = ["lightning", "lightning.fabric", "lightning.fabric.plugins", "lightning.fabric.plugins.environments"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
    module.ClusterEnvironment = type("ClusterEnvironment", (), {})  # type: ignore[attr-defined]
    variables = {"RANK": 5, "LOCAL_RANK": 1, "GROUP_RANK": 2, "WORLD_SIZE": 6, "MASTER_PORT": 7, "MASTER_ADDR": "a"}
    for name, value in {**variables, "TORCHELASTIC_RUN_ID": "run"}.items():
        monkeypatch.setenv(name, f"{value}")
    made: Any = trx.TorchrunxClusterEnvironment()
    found = (
        made.global_rank(),
        made.local_rank(),
        made.node_rank(),
        made.world_size(),
        made.main_port,
        made.main_address,
    )
    assert found == (*variables.values(),)
    assert made.detect()
    assert made.creates_processes_externally
    monkeypatch.delitem(sys.modules, "torchelastic.launcher.lightning")
