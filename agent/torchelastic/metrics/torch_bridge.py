"""Forwards values that a program records with torch's own metrics (``torch.distributed.elastic.metrics``) to ours.

The configuration of torch's metrics does not change. This module does not import torch: it waits for the import of
torch's module.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from torchelastic.metrics.api import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_MODULE: Final = "torch.distributed.elastic.metrics.api"


def watch() -> None:
    """Forward torch's values to the registry, from now on or from the import of torch's module on."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        _join(module)
    else:
        sys.meta_path.insert(0, _Finder())


def _join(api: ModuleType) -> None:
    stream: Any = api.MetricStream
    plain = stream.add_value

    @functools.wraps(plain)
    def add_value(self: Any, metric_name: str, metric_value: float) -> None:  # noqa: ANN401 - a stream of torch's
        REGISTRY.add(str(self.group_name), metric_name, metric_value)
        plain(self, metric_name, metric_value)

    stream.add_value = add_value


class _Finder:
    """The first module finder until torch's module is imported; it delegates the search to the other finders."""

    def find_spec(self, name: str, _path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        """Return the module's specification, with a call after its execution; None for any other module."""
        if name != _MODULE:
            return None
        with suppress(ValueError):  # the program has removed it, or imports in two threads
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:

            def execute_and_join(module: ModuleType) -> None:
                del loader.exec_module  # as it was
                loader.exec_module(module)
                _join(module)

            loader.exec_module = execute_and_join
        return spec
