"""torchelastic's metrics API, on a registry that does not import torch.

A program records values under a *group* and a *name*; :func:`configure` sets the handler of a group. Values of a group
without a handler are dropped, which costs one dictionary lookup.

*Configured* handlers belong to the program: one per group, and a default for all groups without their own handler.
*Attached* handlers belong to torchelastic: they receive every value, in addition to the configured handlers.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import inspect
import logging
import math
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, TypeVar, cast, overload

from torchelastic.metrics.series import BUILT_IN_FAMILIES, COUNTER, DEFAULT_GROUP, DURATION_BUCKETS, Kind, MetricType

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

__all__ = [
    "ConsoleMetricHandler",
    "ConsoleMetricsHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "NullMetricsHandler",
    "configure",
    "declare",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]

_TORCH_METRICS: Final = "torch.distributed.elastic.metrics.api"

logger: Final = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class MetricData(NamedTuple):
    """One value of a metric, as passed to a handler; the timestamp is in seconds since 1970."""

    timestamp: float
    group_name: str
    name: str
    value: float


class MetricHandler(abc.ABC):
    """Receives values. Subclasses implement :meth:`emit`, which is called in the thread that records the value."""

    @abc.abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Handle one value. An exception does not reach the program, and is logged once per handler."""


class NullMetricHandler(MetricHandler):
    """Drops values. If a group has this handler, the default handler does not receive the group's values."""

    def emit(self, metric_data: MetricData) -> None:
        """Do nothing."""


NullMetricsHandler = NullMetricHandler
"""An alias that torchelastic's documentation uses."""


class ConsoleMetricHandler(MetricHandler):
    """Prints each value: ``[timestamp][group]: name=value``."""

    def emit(self, metric_data: MetricData) -> None:
        """Print one line to the standard output."""
        timestamp, group, name, value = metric_data
        # One write per line, so that lines of several threads do not mix.
        sys.stdout.write(f"[{timestamp}][{group}]: {name}={value}\n")


ConsoleMetricsHandler = ConsoleMetricHandler
"""An alias that torchelastic's documentation uses."""


class MetricsConfig:
    """The parameters of :func:`initialize_metrics`; ``params`` has their values by name."""

    __slots__ = ("params",)

    def __init__(self, params: Mapping[str, str] | None = None) -> None:
        self.params = dict(params or {})


class MetricRegistry:
    """The handlers of each group, and the declared metric types. Values may be added in any thread.

    Attributes:
        attached: the handlers that receive every value.
    """

    def __init__(self) -> None:
        self._configured: dict[str | None, MetricHandler] = {}
        self.attached: tuple[MetricHandler, ...] = ()
        # Replaced at each change and never modified, because other threads read it.
        self._routes: Mapping[str | None, tuple[MetricHandler, ...]] = {None: ()}
        self._failed: list[MetricHandler] = []
        self._declared: dict[tuple[str, str], MetricType] = {}
        self._used: dict[tuple[str, str], MetricType] = {}

    def configure(self, handler: MetricHandler, group: str | None = None) -> None:
        """Set the handler of a group.

        Args:
            handler: receives the values.
            group: the group; None for all groups without their own handler.

        Raises:
            TypeError: the object is not a handler.
        """
        if isinstance(handler, type) or not callable(getattr(handler, "emit", None)):
            what = f"the class {handler.__name__}; pass an instance" if isinstance(handler, type) else repr(handler)
            raise TypeError(f"A metric handler is an object with a method emit(metric_data), not {what}.")
        self._configured[None if group is None else str(group)] = handler
        self._route(self.attached)

    def attach(self, handler: MetricHandler) -> None:
        """Send every value to this handler, in addition to the configured handlers."""
        self._route((*self.attached, handler))

    def detach(self, handler: MetricHandler) -> None:
        """Undo :meth:`attach`."""
        self._route(tuple(attached for attached in self.attached if attached is not handler))

    def declare(
        self, group: str, *, counters: Collection[str] = (), histograms: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """Declare the Prometheus types of metrics of a group. Undeclared metrics become gauges.

        The declaration applies to an agent's ``/metrics`` and to every :class:`PrometheusMetricHandler`. It must
        precede the first value of a metric; a late declaration has no effect and logs a warning.

        Args:
            group: the group.
            counters: names whose values are added up, such as a number of samples.
            histograms: names whose values are counted in buckets, with the upper bounds of the buckets. If the name
                ends in ``.ms`` or ``_ms``, the values are in milliseconds, but the bounds are in seconds.

        Raises:
            ValueError: an argument has another type, or the buckets are not ascending numbers.
        """
        untyped: object = counters  # A caller without a type checker may pass any object.
        is_collection = isinstance(untyped, Iterable) and not isinstance(untyped, str)
        if not is_collection or not isinstance({} if histograms is None else histograms, Mapping):
            raise ValueError(
                "counters must be a collection of names, like ['samples'], and histograms must map names to buckets."
            )
        types = dict.fromkeys(counters, COUNTER)
        for name, bounds in (histograms or {}).items():
            try:
                buckets = tuple(map(float, bounds))
            except (TypeError, ValueError, OverflowError):
                buckets = ()
            if not buckets or not all(map(math.isfinite, buckets)) or sorted(set(buckets)) != list(buckets):
                raise ValueError(
                    f"The buckets of {name!r} must be finite numbers, each above the previous one, like [0.1, 1]."
                )
            types[name] = MetricType(Kind.HISTOGRAM, buckets)
        for name, metric_type in types.items():
            used = self._used.get((str(group), name), metric_type)
            if used == metric_type:
                self._declared[str(group), name] = metric_type
            else:
                logger.warning(
                    "%r of group %r has values of type %s; declare it before its first value.", name, group, used.kind
                )

    def type_of(self, group: str, name: str) -> MetricType:
        """Return the type of a metric. The first call fixes the type. An undeclared metric is a gauge."""
        platform = BUILT_IN_FAMILIES.get(name) if group == DEFAULT_GROUP else None
        default = MetricType() if platform is None else platform.type
        return self._used.setdefault((group, name), self._declared.get((group, name), default))

    def add(self, group: str, name: str, value: float, handler: MetricHandler | None = None) -> None:
        """Pass a value with the current time to the handlers of the group, or to this handler in their place."""
        routes = self._routes
        handlers = routes.get(group, routes[None]) if handler is None else (handler, *self.attached)
        if handlers:
            data = MetricData(time.time(), group, name, value)
            for each in handlers:
                try:
                    each.emit(data)
                except Exception:  # noqa: BLE001 - a failing handler must not stop the program
                    self._report(each, data)

    def _route(self, attached: tuple[MetricHandler, ...]) -> None:
        self.attached = attached
        routes: dict[str | None, tuple[MetricHandler, ...]] = {None: attached}
        for group, handler in self._configured.items():
            routes[group] = attached if type(handler) is NullMetricHandler else (handler, *attached)
        self._routes = routes

    def _report(self, handler: MetricHandler, data: MetricData) -> None:
        """Log the current exception, if it is the first one of this handler."""
        if not any(failed is handler for failed in self._failed):
            self._failed.append(handler)
            logger.exception(  # noqa: LOG004 - called by an exception handler
                "The metric handler %s failed for %r of group %s. The program continues; further errors of this "
                "handler are not logged.",
                type(handler).__name__,
                data.name,
                data.group_name,
            )


REGISTRY: Final = MetricRegistry()
"""The process-wide registry, which the functions below use."""

declare: Final = REGISTRY.declare


def forward_torch() -> None:
    """Also record the values of torch's own metrics in this registry, if torch has been imported."""
    if "torch" not in sys.modules:
        return
    try:
        stream: Any = importlib.import_module(_TORCH_METRICS).MetricStream
    except ImportError:  # an incomplete torch, or another module of this name
        return
    original = stream.add_value
    if hasattr(original, "__wrapped__"):  # this function was called before
        return

    @functools.wraps(original)
    def add_value(self: Any, metric_name: str, metric_value: float) -> None:  # noqa: ANN401 - torch's stream
        REGISTRY.add(str(self.group_name), metric_name, metric_value)
        original(self, metric_name, metric_value)

    stream.add_value = add_value


class MetricStream:
    """A stream of values of the group ``group_name``. Handlers receive only values that are recorded later.

    The values go to ``handler``, or to the group's handlers if it is None.
    """

    __slots__ = ("_registry", "group_name", "handler")

    def __init__(
        self, group_name: str, handler: MetricHandler | None = None, registry: MetricRegistry = REGISTRY
    ) -> None:
        self.group_name = group_name
        self.handler = handler
        self._registry = registry

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Record one value."""
        self._registry.add(self.group_name, metric_name, metric_value, self.handler)


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Do nothing. Launchers that follow torchelastic's guide call this function first."""


@functools.wraps(REGISTRY.configure)
def configure(handler: MetricHandler, group: str | None = None) -> None:  # noqa: D103 - the wrapped docstring
    forward_torch()
    REGISTRY.configure(handler, group)


def getStream(group: str) -> MetricStream:  # noqa: N802 - the name in torchelastic's documentation
    """Return the stream of a group."""
    forward_torch()
    return MetricStream(str(group))


def put_metric(metric_name: str, metric_value: float, metric_group: str = DEFAULT_GROUP) -> None:
    """Record one value."""
    REGISTRY.add(str(metric_group), metric_name, metric_value)


def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """Record one value; the older form of :func:`put_metric`."""
    put_metric(metric_name, metric_value, metric_group)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Return the whole milliseconds since a value of ``time.time()``."""
    return int((time.time() - start_time_in_seconds) * 1000)


@overload
def prof(fn: Callable[Parameters, Result], group: str = ...) -> Callable[Parameters, Result]: ...


@overload
def prof(
    fn: None = None, group: str = ...
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]: ...


def prof(fn: Callable[..., Any] | None = None, group: str = DEFAULT_GROUP) -> Callable[..., Any]:
    """Decorate a function to measure its successes, failures and durations.

    Each call adds 1 to the counter ``<name>.success`` or ``<name>.failure``, and its duration to the histogram
    ``<name>.duration.ms``. The name is ``Class.function`` for a method and ``module.function`` for a plain
    function. A coroutine function is measured until its coroutine ends. Use the decorator as
    ``@prof`` or as ``@prof(group="my_app")``.
    """
    if fn is None:
        return functools.partial(prof, group=group)
    name = str(getattr(fn, "__qualname__", type(fn).__qualname__))
    if "." not in name and (module := getattr(fn, "__module__", None)):
        name = f"{module.rpartition('.')[2]}.{name}"
    return _decorated(fn, name, group)


def profile(group: str | None = None) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function as :func:`prof` does; the older form, whose names begin with the name of the function."""
    return lambda fn: _decorated(fn, getattr(fn, "__name__", type(fn).__name__), str(group or DEFAULT_GROUP))


def _decorated(function: Callable[..., Any], name: str, group: str) -> Callable[..., Any]:
    duration = {f"{name}.duration.ms": DURATION_BUCKETS}
    REGISTRY.declare(group, counters=[f"{name}.success", f"{name}.failure"], histograms=duration)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's own arguments
        with _measured(name, group):
            return function(*args, **kwargs)

    @functools.wraps(function)
    async def call_and_wait(*args: Any, **kwargs: Any) -> object:  # noqa: ANN401
        with _measured(name, group):
            return await cast("Awaitable[object]", function(*args, **kwargs))

    return call_and_wait if inspect.iscoroutinefunction(function) else call


@contextlib.contextmanager
def _measured(name: str, group: str) -> Iterator[None]:
    """Record the outcome and the duration of a block, under the names of :func:`prof`."""
    began = time.perf_counter()
    try:
        yield
    except Exception:
        REGISTRY.add(group, f"{name}.failure", 1)
        raise
    else:
        REGISTRY.add(group, f"{name}.success", 1)
    finally:
        # Cancellation, interrupts and exits are neither success nor failure: only their duration is recorded.
        REGISTRY.add(group, f"{name}.duration.ms", (time.perf_counter() - began) * 1000)
