"""The metrics API that programs written for torchelastic know, on a registry that is free of torch.

A program measures under a *group* and a *name*; :func:`configure` says where the values go. Values of a group without a
handler are dropped, at the cost of a look-up in a dictionary.

*Configured* handlers are the program's: one for each group, and one for all groups that have none of their own.
*Attached* handlers are the platform's: they get every value, whatever is configured.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, TypeVar, cast, overload

from torchelastic.metrics.series import DURATION_BUCKETS, PLATFORM_GROUP, PLATFORM_SERIES, Form, Kind, forms_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence

    from torchelastic.metrics.series import Series

_log: Final = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_MAX_REMEMBERED: Final = 10_000
"""Names for which a late declaration is noticed."""


class MetricData(NamedTuple):
    """One value, as a handler gets it.

    Attributes:
        timestamp: seconds since 1970.
        group_name: the group.
        name: the name within the group.
        value: a number.
    """

    timestamp: float
    group_name: str
    name: str
    value: float


class MetricHandler(abc.ABC):
    """Takes values. Subclasses write :meth:`emit`; it is called in the thread that measures."""

    @abc.abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Take one value; what this raises does not reach the program, and is logged once for each handler."""


class NullMetricHandler(MetricHandler):
    """Drops what it gets: configured for a group, it keeps that group from the default handler."""

    def emit(self, metric_data: MetricData) -> None:
        """Do nothing."""


NullMetricsHandler = NullMetricHandler
"""The same under the other name in torchelastic's documentation."""


class ConsoleMetricHandler(MetricHandler):
    """Prints each value: ``[timestamp][group]: name=value``."""

    def emit(self, metric_data: MetricData) -> None:
        """Print one line to the standard output."""
        timestamp, group, name, value = metric_data
        # In one piece, so that lines of several threads do not mix.
        sys.stdout.write(f"[{timestamp}][{group}]: {name}={value}\n")


ConsoleMetricsHandler = ConsoleMetricHandler
"""The same under the other name in torchelastic's documentation."""


class MetricsConfig:
    """Parameters for :func:`initialize_metrics`, for programs that pass them.

    Attributes:
        params: by name.
    """

    __slots__ = ("params",)

    def __init__(self, params: Mapping[str, str] | None = None) -> None:
        self.params = dict(params or {})


class MetricRegistry:
    """Which handlers get the values of which group; may be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._configured: dict[str | None, MetricHandler] = {}
        self._attached: tuple[MetricHandler, ...] = ()
        # Replaced at each change and never changed in place, so that they are read without the lock.
        self._by_group: Mapping[str | None, tuple[MetricHandler, ...]] = {}
        self._default: tuple[MetricHandler, ...] = ()
        self._failed: list[MetricHandler] = []
        self._forms: dict[tuple[str, str], Form | Series] = {
            (PLATFORM_GROUP, name): series for name, series in PLATFORM_SERIES.items()
        }
        self._used: dict[tuple[str, str], Form | Series] = {}

    def configure(self, handler: MetricHandler, group: str | None = None) -> None:
        """Send the values of a group, or of all groups that have no handler of their own, to this handler alone.

        Raises:
            TypeError: it is no handler.
        """
        if isinstance(handler, type) or not callable(getattr(handler, "emit", None)):
            what = f"the class {handler.__name__}; make an object of it" if isinstance(handler, type) else repr(handler)
            raise TypeError(f"A metric handler is an object with a method emit(metric_data), not {what}.")
        with self._lock:
            self._configured[group] = handler
            self._route()

    def attach(self, handler: MetricHandler) -> None:
        """Send every value of every group to this handler too, whatever is configured."""
        with self._lock:
            self._attached = (*self._attached, handler)
            self._route()

    def detach(self, handler: MetricHandler) -> None:
        """Undo :meth:`attach`."""
        with self._lock:
            self._attached = tuple(attached for attached in self._attached if attached is not handler)
            self._route()

    @property
    def attached(self) -> tuple[MetricHandler, ...]:
        """The handlers that get every value."""
        return self._attached

    def after_fork(self, handler: MetricHandler) -> None:
        """In a forked process: detach a handler that only its parent may use."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self.detach(handler)

    def declare(self, group: str, forms: Mapping[str, Form | Series]) -> None:
        """Say what names of a group become; this holds for names without a value. A late one is logged."""
        self._forms |= {(group, name): form for name, form in forms.items()}
        for name, form in forms.items():
            used = self._used.get((group, name), form)
            if used != form:
                self._used[group, name] = form  # logged once
                _log.warning(
                    "%r of the group %r was declared to be %s after its first value, and stays %s. Declare it before.",
                    name,
                    group,
                    _described(form),
                    _described(used),
                )

    def form(self, group: str, name: str) -> Form | Series:
        """What a name becomes, asked for its first value; a gauge if it was not declared."""
        form = self._forms.get((group, name), _GAUGE)
        if len(self._used) < _MAX_REMEMBERED:
            self._used.setdefault((group, name), form)
        return form

    def add(self, group: str, name: str, value: float) -> None:
        """Hand a value, stamped with the current time, to the handlers of its group."""
        handlers = self._by_group.get(group, self._default)
        if handlers:
            data = MetricData(time.time(), group, name, value)
            for handler in handlers:
                try:
                    handler.emit(data)
                except Exception:  # noqa: BLE001 - whatever is wrong with a handler, the program goes on
                    self._report(handler, data)

    def _route(self) -> None:
        routes = {
            group: self._attached if type(configured) is NullMetricHandler else (configured, *self._attached)
            for group, configured in self._configured.items()
        }
        self._by_group = routes
        self._default = routes.get(None, self._attached)

    def _report(self, handler: MetricHandler, data: MetricData) -> None:
        """Log the error that is being handled, if it is the first one of this handler."""
        if not any(failed is handler for failed in self._failed):
            self._failed.append(handler)
            _log.exception(
                "The metric handler %s failed for %r of group %s. The program goes on; further errors of this "
                "handler are not shown.",
                type(handler).__name__,
                data.name,
                data.group_name,
            )


_GAUGE: Final = Form()


def _described(form: Form | Series) -> str:
    return f"a {form.kind}" + f" with the buckets {list(form.buckets)}" * bool(form.buckets)


REGISTRY: Final = MetricRegistry()
"""The registry of the functions below, which have no argument that could carry another one."""


class MetricStream:
    """Values of one group. A handler that is configured later gets the values of earlier streams, too.

    Attributes:
        group_name: the group.
    """

    __slots__ = ("_registry", "group_name")

    def __init__(self, group_name: str, registry: MetricRegistry = REGISTRY) -> None:
        self.group_name = group_name
        self._registry = registry

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Measure one value now."""
        self._registry.add(self.group_name, metric_name, metric_value)


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Say where values go.

    Args:
        handler: gets the values.
        group: only those of this group; None for those of every group that has no handler of its own.

    Raises:
        TypeError: it is no handler.
    """
    REGISTRY.configure(handler, None if group is None else str(group))


def declare(
    group: str, *, counters: Collection[str] = (), histograms: Mapping[str, Sequence[float]] | None = None
) -> None:
    """Say what names of a group become for Prometheus; whatever is not declared becomes a gauge.

    This holds for the page of an agent and for every :class:`PrometheusMetricHandler`, for names of which no value
    was measured before; for other names, a warning says that it came too late.

    Args:
        group: the group.
        counters: names whose values are added up, such as a number of samples.
        histograms: names whose values are counted in buckets, and the buckets' upper bounds; in seconds if the name
            ends in ``.ms`` or ``_ms``.

    Raises:
        ValueError: that is no collection of names or no mapping of names to buckets, the buckets are not ascending
            numbers, or a name is both a counter and a histogram.
    """
    REGISTRY.declare(str(group), forms_of(counters, {} if histograms is None else histograms))


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Do nothing; launchers written to torchelastic's guide call it before they run."""


def getStream(group: str) -> MetricStream:  # noqa: N802 - the name in torchelastic's documentation
    """The stream of a group."""
    return MetricStream(str(group))


def put_metric(metric_name: str, metric_value: float, metric_group: str = PLATFORM_GROUP) -> None:
    """Measure one value now, in one line."""
    REGISTRY.add(str(metric_group), metric_name, metric_value)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Whole milliseconds since a time that ``time.time()`` gave."""
    return int((time.time() - start_time_in_seconds) * 1000)


@overload
def prof(fn: Callable[Parameters, Result], group: str = ...) -> Callable[Parameters, Result]: ...


@overload
def prof(
    fn: None = None, group: str = ...
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]: ...


def prof(fn: Callable[..., Any] | None = None, group: str = PLATFORM_GROUP) -> Callable[..., Any]:
    """Measure how often a function succeeds and fails and how long it takes; a decorator.

    Each call puts ``<name>.success`` or ``<name>.failure`` (1), counters for Prometheus, and ``<name>.duration.ms``, a
    histogram. The name is ``Class.function`` for a method and ``module.function`` for a plain function. A coroutine
    function is measured until its coroutine ends. Used as ``@prof`` or as ``@prof(group="my_app")``.
    """
    if fn is None:
        return functools.partial(prof, group=group)
    function = fn
    name = str(getattr(fn, "__qualname__", type(fn).__qualname__))
    if "." not in name and (module := getattr(fn, "__module__", None)):
        name = f"{module.rpartition('.')[2]}.{name}"
    counted = dict.fromkeys((f"{name}.success", f"{name}.failure"), Form(Kind.COUNTER))
    REGISTRY.declare(group, {**counted, f"{name}.duration.ms": Form(Kind.HISTOGRAM, DURATION_BUCKETS)})

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - those of the function
        with measured(name, group):
            return function(*args, **kwargs)

    @functools.wraps(fn)
    async def call_and_wait(*args: Any, **kwargs: Any) -> object:  # noqa: ANN401
        with measured(name, group):
            return await cast("Awaitable[object]", function(*args, **kwargs))

    return call_and_wait if inspect.iscoroutinefunction(fn) else call


@contextlib.contextmanager
def measured(name: str, group: str, registry: MetricRegistry = REGISTRY) -> Iterator[None]:
    """Put the outcome and the duration of a block, under the names that :func:`prof` describes."""
    began = time.perf_counter()
    try:
        yield
    except Exception:
        registry.add(group, f"{name}.failure", 1)
        raise
    else:
        registry.add(group, f"{name}.success", 1)
    finally:
        # A cancelled coroutine, an interrupt and an exit are neither success nor failure: only their duration counts.
        registry.add(group, f"{name}.duration.ms", (time.perf_counter() - began) * 1000)
