"""The report of a job as one page of HTML, which needs nothing beside it.

There is no script in it, and nothing is loaded; the page itself forbids both, so that it can be opened from anywhere.
Where text of the program's stands in it, it is text.
"""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from elastic_operator.showing import quantities, words
from elastic_operator.showing.markup import Markup, element, joined
from elastic_operator.showing.report_charts import STATES, time_split, timeline
from elastic_operator.showing.report_facts import facts
from elastic_operator.showing.report_style import STYLE
from torchelastic.contract import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from elastic_operator.report import Report
    from elastic_operator.showing.report_facts import Facts, Span, Trouble
    from torchelastic.contract import TimeSplit

_SUMMARY: Final = 240
"""Characters of a message that are seen at once; all of it is there when it is asked for."""


_UNKNOWN: Final = element("td", "-", class_="number")


def page(report: Report, ended: str = "") -> str:
    """The report as a page of HTML.

    Args:
        report: what is kept of the job.
        ended: in a word, how the run of an unfinished job came to its end; empty where it goes on.
    """
    found = facts(report)
    state = report.state.value if report.state.finished or not ended else ended[:1].upper() + ended[1:]
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    title = f"{report.name}: {state.lower()} after {words.duration(found.end - found.begin)}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(STYLE)),
    )
    body = element("body", _header(found, state), _figures(found), joined(_sections(found)), _footer(found))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _header(found: Facts, state: str) -> Markup:
    report = found.report
    where = element("small", f"in {report.namespace}") if report.namespace else None
    badge = element("span", state, class_=f"outcome {state if report.state.finished else 'other'}")
    until = "over" if report.completed is not None else "told of up to"
    times = f"made {_moment(found.begin)}, {until} {_moment(found.end)}"
    return element(
        "header",
        element("div", element("h1", report.name, where), badge, class_="head"),
        element("p", times, class_="dim"),
        _cause(found),
    )


def _cause(found: Facts) -> Markup | None:
    """Why it failed."""
    report = found.report
    said = report.message or (report.outcome.message if report.outcome else "")
    if not said or report.state.value == "Succeeded":
        return None
    label = "Root cause" if report.state.value == "Failed" else "Note"
    return element("div", element("b", f"{label}: "), _message(said), class_="cause")


def _figures(found: Facts) -> Markup:
    report = found.report
    split = report.split
    workers = sorted({span.epoch.workers for span in found.spans if span.epoch.workers})
    world = f"{workers[0]} to {workers[-1]}" if len(workers) > 1 else str(workers[0]) if workers else "-"
    charged = sum(not trouble.free and trouble.rank is not None for trouble in found.troubles)
    facts_ = [
        ("Took", words.duration(found.end - found.begin), ""),
        (
            "Goodput",
            "-" if found.goodput is None else quantities.share(found.goodput),
            "training that was kept",
        ),
        ("Work lost", "-" if split is None or split.lost is None else quantities.span(split.lost), _lost_note(found)),
        ("Epochs", str(found.last), ""),
        ("Workers", world, "" if split is None else _came_and_went(split)),
        ("Failures", str(len(found.troubles)), f"{charged} charged to the job" if found.troubles else ""),
    ]
    return element(
        "dl",
        *(
            element("div", element("dt", label), element("dd", value, element("small", note) if note else None))
            for label, value, note in facts_
        ),
        class_="figures",
    )


def _came_and_went(split: TimeSplit) -> str:
    gone = [f"{count} {end.replace('_', ' ')}" for end, count in split.gone.items() if count]
    return ", ".join([f"{words.count(split.joined, 'pod')} came", *gone])


def _lost_note(found: Facts) -> str:
    split = found.report.split
    return "no checkpoint was told of" if split is None or split.lost is None else "training since checkpoints"


def _sections(found: Facts) -> Iterator[Markup]:
    if found.spans:
        yield element("section", element("h2", "Timeline"), timeline(found), _legend(found))
    if found.report.split is not None and found.report.split.seconds:
        yield element("section", element("h2", "Where the time went"), time_split(found), _split_table(found))
    if found.troubles:
        yield element("section", element("h2", "What went wrong"), _troubles(found.troubles, found))
    if found.spans:
        yield element("section", element("h2", "Epochs"), joined(_epochs(found)))


def _legend(found: Facts) -> Markup:
    rows: list[tuple[str, str, str | None, str]] = [("rect", "epoch odd", None, "an epoch, as high as it has workers")]
    if any(span.lost for span in found.spans):
        rows.append(("rect", "lost", "url(#lost)", "training that no checkpoint held"))
    if any(span.end is None for span in found.spans):
        rows.append(("rect", "unknown", "url(#unknown)", "epochs that are not kept"))
    entries = [
        element(
            "span",
            element("svg", element(shape, class_=kind, fill=fill, width=14, height=14), width=14, height=14),
            text,
        )
        for shape, kind, fill, text in rows
    ]
    if found.troubles:
        mark = element("svg", element("path", d="M1,2 L13,2 L7,13 Z"), class_="failure", width=14, height=14)
        entries.append(element("span", mark, "a failure"))
    return element("div", *entries, class_="legend")


def _split_table(found: Facts) -> Markup:
    split = found.report.split
    if split is None:
        return Markup()
    whole = sum(split.seconds.values())
    rows = []
    for state, meaning in STATES.items():
        spent = split.seconds.get(RunState(state))
        if spent is None:
            continue
        rows.append(
            [
                _cell(joined([element("span", class_=f"key state {state}"), state]), "short"),
                _cell(quantities.span(spent), "number"),
                _cell(quantities.share(spent / whole) if whole else "-", "number"),
                _cell(meaning, "text dim"),
            ]
        )
    return _table(("state", "time*", "share*", ""), rows)


def _troubles(troubles: Iterable[Trouble], found: Facts) -> Markup:
    rows = []
    for trouble in troubles:
        where = "" if trouble.rank is None else f"rank {trouble.rank}, {trouble.pod}"
        rows.append(
            [
                _cell(_since(trouble.time, found), "number"),
                _cell(str(trouble.epoch or "-"), "number"),
                _cell(where, "short"),
                _cell(trouble.what, "short bad"),
                _cell(joined([_message(trouble.message), _consequence(trouble)]), "text"),
                _seconds(trouble.lost),
            ]
        )
    return _table(("after*", "epoch*", "where", "how", "why", "lost*"), _told(rows), "failure")


def _consequence(trouble: Trouble) -> Markup:
    if trouble.final:
        return element("div", "The job failed of this.", class_="dim")
    return element("div", "Charged to nobody.", class_="dim") if trouble.free else Markup()


def _epochs(found: Facts) -> Iterator[Markup]:
    omitted = found.report.history.omitted
    if omitted:
        kept = len(found.spans)
        yield element(
            "p", f"{words.count(omitted, 'epoch')} of {kept + omitted} are not kept, those in the middle.", class_="dim"
        )
    rows = [_epoch(span, found) for span in found.spans]
    yield _table(("epoch*", "after*", "lasted*", "workers*", "pods*", "why it began", "lost*"), _told(rows))


def _epoch(span: Span, found: Facts) -> list[Markup]:
    epoch = span.epoch
    return [
        _cell(str(epoch.number), "number"),
        _cell(_since(epoch.began, found), "number"),
        _seconds(None if span.end is None else span.end - epoch.began),
        _cell(str(epoch.workers), "number"),
        _cell(str(epoch.nodes), "number"),
        _cell(_message(epoch.cause or epoch.reason.replace("_", " ")), "text"),
        _seconds(span.lost),
    ]


def _told(rows: Sequence[Sequence[Markup]]) -> Sequence[Sequence[Markup]]:
    """Rows without their last column, where nobody has told of it."""
    return rows if any(row[-1] != _UNKNOWN for row in rows) else [row[:-1] for row in rows]


def _table(titles: Sequence[str], rows: Sequence[Sequence[Markup]], name: str = "") -> Markup:
    """A table.

    Args:
        titles: of the columns; those that end with a star are of numbers, those without a column are left out.
        rows: their cells.
        name: by which a row is found with its number behind it, from 1; empty where none has to be.
    """
    heads = [
        element("th", title.removesuffix("*"), class_="number" if title.endswith("*") else None, scope="col")
        for title, _ in zip(titles, rows[0], strict=False)
    ]
    body = [element("tr", *cells, id=f"{name}-{number}" if name else None) for number, cells in enumerate(rows, 1)]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *body))
    return element("div", table, class_="wide")


def _cell(content: str, kind: str) -> Markup:
    return element("td", content, class_=kind)


def _seconds(seconds: float | None) -> Markup:
    return _UNKNOWN if seconds is None else _cell(quantities.span(seconds), "number")


def _message(text: str) -> Markup:
    """A message: of a long one what says most, and all of it when it is asked for."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2 and len(text) <= _SUMMARY:
        return joined([text.strip()])
    summary = words.shortened((lines or [""])[-1].strip(), _SUMMARY)
    return element("details", element("summary", summary), element("pre", text.strip("\n")))


def _since(time: float, found: Facts) -> str:
    """When something was, since the job was made."""
    return quantities.span(max(0.0, time - found.begin))


def _moment(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _footer(found: Facts) -> Markup:
    uid = f" Its UID was {found.report.uid}." if found.report.uid else ""
    return element("footer", f"A report of an ElasticJob, made by `elasticjob report {found.report.name}`.{uid}")
