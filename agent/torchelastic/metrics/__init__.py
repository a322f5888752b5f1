"""Metrics: a program records values in groups, and each group has a handler that receives its values.

::

    from torchelastic import metrics

    metrics.configure(metrics.ConsoleMetricHandler(), group="my_app")

    stream = metrics.getStream("my_app")
    stream.add_value("train.loss", 0.25)

    @metrics.prof(group="my_app")
    def evaluate(): ...

Without ``configure``, values are dropped. In a worker of torchelastic's agent, all values also appear on the agent's
``/metrics`` page, without any configuration. :class:`PrometheusMetricHandler` serves values to Prometheus itself. It is
imported at its first use, because it needs a library that other programs do not need.
"""

from typing import TYPE_CHECKING

from torchelastic.lazy import lazy_attributes
from torchelastic.metrics import api, worker
from torchelastic.metrics.api import *  # noqa: F403

if TYPE_CHECKING:
    from torchelastic.metrics.prometheus import PrometheusMetricHandler

__all__ = ["PrometheusMetricHandler"]
__all__ += api.__all__


__getattr__ = lazy_attributes(__name__, {"torchelastic.metrics.prometheus": "PrometheusMetricHandler"})

api.forward_torch()
worker.attach()
