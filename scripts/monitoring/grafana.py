"""Generates Grafana's JSON document of a dashboard."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from grafana_foundation_sdk.builders import bargauge, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builder
from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from scripts.monitoring.dashboard import Look, Unit

if TYPE_CHECKING:
    from scripts.monitoring.dashboard import Dashboard, Mark, Panel, Query, Variable

TAG: Final = "elasticjob"
"""The tag for the links between the dashboards."""
SOURCE: Final = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHTS: Final = {Look.NUMBER: 4, Look.TABLE: 9}
HEIGHT: Final = 8
NAMESPACE, JOB = "Namespace", "Job"
"""The titles of columns of a table of jobs."""
HOLDS: Final = "Holds"
"""The title of a column that only filters the rows; it is not shown."""
_YES: Final = model.ValueMappingResult(text="yes", color="blue")
TO_THE_JOB: Final = (
    "/d/{uid}?var-datasource=${{datasource}}&var-job_namespace=${{__data.fields.{namespace}}}"
    "&var-elasticjob=${{__data.fields.{job}}}&${{__url_time_range}}"
)

AnyPanel = bargauge.Panel | stat.Panel | statetimeline.Panel | table.Panel | timeseries.Panel


def document(dashboard: Dashboard, *, job_uid: str) -> str:
    """Return the JSON document of a dashboard; tables of jobs have links to the dashboard ``job_uid``."""
    board = (
        builder.Dashboard(dashboard.title)
        .uid(dashboard.uid)
        .description(dashboard.about)
        .tags([TAG])
        .timezone(shapes.TimeZoneBrowser)
        .time(dashboard.since, "now")
        .refresh("30s")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(
            builder.DashboardLink("ElasticJobs")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(builder.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    repeated = {panel.repeat for panel in dashboard.panels}
    for variable in dashboard.variables:
        board.with_variable(_variable(variable, repeated=variable.name in repeated))
    for mark in dashboard.marks:
        board.annotation(_annotation(mark))
    number = 0
    for row in dashboard.rows:
        number += 1
        board.with_row(builder.Row(row.title).id(number))
        for panel in row.panels:
            number += 1
            board.with_panel(_panel(panel, number, job_uid))
    made = json.loads(JSONEncoder(sort_keys=True).encode(board.build()))
    for mark in made["annotations"].get("list", ()):
        # The library lacks two fields of Prometheus' annotations.
        mark |= {"titleFormat": mark["name"], "step": "15s"}
    return json.dumps(made, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _variable(variable: Variable, *, repeated: bool) -> builder.QueryVariable | builder.TextBoxVariable:
    if not variable.values:
        return builder.TextBoxVariable(variable.name).label(variable.label).description(variable.about)
    made = (
        builder.QueryVariable(variable.name)
        .label(variable.label)
        .description(variable.about)
        .datasource(SOURCE)
        .query(variable.values)
        .regex(variable.regex)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )
    if variable.many:
        made.multi(True).include_all(True)
        made.current(model.VariableOption(selected=True, text=["All"], value=["$__all"]))
        if not repeated:  # else a repeated panel would exist for each known name
            made.all_value(".*")
    return made


def _annotation(mark: Mark) -> builder.AnnotationQuery:
    return (
        builder.AnnotationQuery()
        .name(mark.name)
        .datasource(SOURCE)
        .expr(mark.query.expr)
        .enable(True)
        .icon_color(mark.color)
    )


def _panel(panel: Panel, number: int, job_uid: str) -> AnyPanel:
    made: AnyPanel
    match panel.look:
        case Look.NUMBER:
            made = _number(panel)
        case Look.BARS:
            made = (
                bargauge.Panel()
                .orientation(shapes.VizOrientation.HORIZONTAL)
                .display_mode(shapes.BarGaugeDisplayMode.BASIC)
                .reduce_options(_last())
                .min(0)
            )
        case Look.TIMELINE:
            held = {"0": model.ValueMappingResult(text="no", color="transparent"), "1": _YES}
            made = (
                statetimeline.Panel().mappings([model.ValueMap(options=held)]).show_value(shapes.VisibilityMode.NEVER)
            )
            made.legend(VizLegendOptions().show_legend(False).display_mode(shapes.LegendDisplayMode.LIST))
        case Look.TABLE:
            made = _table(panel, job_uid)
        case _:
            made = _lines(panel)
    made.id(number).title(panel.title).description(panel.about).datasource(SOURCE).unit(panel.unit)
    made.height(HEIGHTS.get(panel.look, HEIGHT)).span(panel.width)
    if panel.decimals is not None:
        made.decimals(panel.decimals)
    if panel.repeat:
        made.repeat(panel.repeat).repeat_direction("h").max_per_row(3)
    for letter, query in zip("ABCDEFGHIJ", panel.queries, strict=False):
        made.with_target(_target(query, letter, panel.look))
    return made


def _target(query: Query, letter: str, look: Look) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(letter).expr(query.expr).datasource(SOURCE)
    if look is Look.TABLE:
        return target.instant().format(PromQueryFormat.TABLE)
    if query.legend:
        target.legend_format(query.legend)
    # A number is the last value in the time range, because a finished job has no current value.
    return target.instant() if look is Look.BARS else target.range()


def _last() -> ReduceDataOptions:
    return ReduceDataOptions().calcs(["lastNotNull"]).values(False)


def _number(panel: Panel) -> stat.Panel:
    steps = [model.Threshold(color="text", value=None)]
    if panel.good is not None:
        steps = [model.Threshold(color="orange", value=None), model.Threshold(color="green", value=panel.good)]
    elif panel.bad is not None:
        steps.append(model.Threshold(color="orange", value=panel.bad))
    return (
        stat.Panel()
        .reduce_options(_last())
        .graph_mode(shapes.BigValueGraphMode.AREA)
        .thresholds(builder.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    )


def _lines(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .legend(
            VizLegendOptions()
            .show_legend(True)
            .display_mode(shapes.LegendDisplayMode.LIST)
            .placement(shapes.LegendPlacement.BOTTOM)
        )
        .tooltip(VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.DESCENDING))
        .show_points(shapes.VisibilityMode.AUTO)
        .axis_soft_min(0)
        .line_width(1)
    )
    if panel.look is Look.STEPS:
        made.line_interpolation(shapes.LineInterpolation.STEP_AFTER)
    if panel.look is Look.STACK:
        made.stacking(StackingConfig().mode(shapes.StackingMode.NORMAL)).fill_opacity(40)
        if panel.unit is Unit.SHARE:
            made.max(1)
    return made


def _table(panel: Panel, job_uid: str) -> table.Panel:
    made = table.Panel()
    titles = {f"Value #{letter}": query.legend for letter, query in zip("ABCDEFGHIJ", panel.queries, strict=False)}
    names = {"job_namespace": NAMESPACE, "elasticjob": JOB, "condition": "Condition", **titles}
    shown = [old for old in ("job_namespace", "elasticjob", "condition", *titles) if names[old] != HOLDS]
    made.with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
    made.with_transformation(
        model.DataTransformerConfig(
            id_val="organize",
            options={
                "renameByName": names,
                "excludeByName": dict.fromkeys(["Time", *(old for old in titles if names[old] == HOLDS)], True),
                "indexByName": {old: place for place, old in enumerate(shown)},
            },
        )
    )
    address = TO_THE_JOB.format(uid=job_uid, namespace=NAMESPACE, job=JOB)
    link: dict[str, Any] = {"title": "Its own dashboard", "url": address}
    made.override_by_name(JOB, [model.DynamicConfigValue(id_val="links", value=[link])])
    for column, unit in panel.units:
        made.override_by_name(column, [model.DynamicConfigValue(id_val="unit", value=str(unit))])
    return made
