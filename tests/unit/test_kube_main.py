"""``elastic-operator`` with a kubeconfig that does not do."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from elastic_operator.kubernetes.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NO_CERTIFICATE = {"certificate-authority-data": "eA=="}
NO_PROGRAM = {"exec": {"command": "/no/such/program", "apiVersion": "client.authentication.k8s.io/v1"}}


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Whatever is set up for the log is undone."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    ("cluster", "user", "sentence"),
    [
        (NO_CERTIFICATE, {}, "elastic-operator: the certificates of the kubeconfig cannot be used: "),
        ({}, NO_PROGRAM, " gives no credentials: [Errno 2] No such file or directory: '/no/such/program'"),
        ({}, {"auth-provider": 5}, " cannot be used ("),
    ],
)
def test_what_is_wrong_with_a_kubeconfig_is_told_in_a_sentence(
    cluster: dict[str, Any], user: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config"
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "there", "user": "me"}}],
        "clusters": [{"name": "there", "cluster": {"server": "https://127.0.0.1:1", **cluster}}],
        "users": [{"name": "me", "user": user}],
    }
    path.write_text(json.dumps(config))
    assert main([f"--kubeconfig={path}", "--listen=127.0.0.1:0"]) == 2
    told = capsys.readouterr().err
    assert sentence in told.splitlines()[-1]
    assert "Traceback" not in told
