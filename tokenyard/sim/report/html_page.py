"""Reports: one self-contained page of charts and tables, in the style of the live page.

`write_page` is what every command calls. The page needs no other file and makes no network requests; its content
security policy (by hashes) allows only its two scripts.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from tokenyard.base import Float64Array
from tokenyard.base.version import __version__
from tokenyard.sim.report.svg_charts import Chart
from tokenyard.ui.files import read_file

SETTING_MARK = ": "
"""A series called `setting: part` has the setting's colour."""

X_DIGITS, Y_DIGITS = 6, 4

SLOTS = 16
"""Number of colours in the pages' theme, `--s1` to `--s16`."""

_KNOWN = (
    *("fcfs", "slo", "lpm", "priority", "edf", "short-first", "vtc", "dlpm"),
    *("adaptive", "mlfq", "hrrn", "dfs-weight", "lof", "random", "sglang-default", "vllm-default"),
)
PARTS = {
    **{"waiting": "s3", "running": "s1", "prefill": "s1", "decode": "s2", "held": "s1", "step": "s1"},
    **{"on the tape": "ink-2", "measured": "s1", "simulated": "s1", "what if": "s3"},
}
"""Colours of series that are not settings, as on the live page."""

PLAIN = "muted"
"""The colour of bounds and targets."""


@dataclass(frozen=True)
class Row:
    """One row of a table: a text per column.

    values: numbers behind the texts, None where not known.
    better: "more" or "less" marks the best value, "" none.
    """

    name: str
    texts: Sequence[str]
    values: Sequence[float | None] = ()
    better: str = ""

    def best(self) -> set[int]:
        """Indices of the best value; empty if all texts are equal, or only one value is known."""
        known = {place: value for place, value in enumerate(self.values) if value is not None and np.isfinite(value)}
        if not self.better or len(known) < 2 or len({self.texts[place] for place in known}) < 2:
            return set()
        most = max(known.values()) if self.better == "more" else min(known.values())
        texts = {self.texts[place] for place, value in known.items() if value == most}
        return {place for place in known if self.texts[place] in texts}


@dataclass(frozen=True)
class Table:
    """Settings (or whatever `columns` names) side by side. A column that is a setting shows its colour."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """A drawing across the page, as an `<svg>` element that names the theme's colours."""

    title: str
    svg: str


@dataclass
class Section:
    """A heading with notes, tables, charts and pictures below it. Charts of the same `Chart.group` share their axes."""

    title: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    pictures: Sequence[Picture] = ()


@dataclass
class Report:
    """The content of a page.

    facts: what was run, by name (command, trace, seed, rate, device, error of the cost model).
    settings: names that have a colour.
    warning: text above the numbers, "" for none.
    """

    title: str
    facts: Mapping[str, str]
    sections: Sequence[Section]
    settings: Sequence[str] = ()
    warnings: Sequence[str] = field(default_factory=tuple)


def write_page(path: Path, report: Report) -> None:
    """Write the page as one file of HTML."""
    path.write_text(page(report), encoding="utf-8")


def page(report: Report) -> str:
    """The page's HTML."""
    colours = colours_of(report.settings)
    data = json.dumps({"charts": _charts(report, colours)}, separators=(",", ":"), allow_nan=False)
    library = read_file("vendor/uPlot.iife.min.js").decode()
    script = read_file("charts.js").decode() + read_file("report.js").decode()
    style = "".join(read_file(name).decode() for name in ("vendor/uPlot.min.css", "theme.css", "report.css"))
    facts = {**report.facts, "version": f"Tokenyard {__version__}"}
    numbers = iter(range(sum(len(section.charts) for section in report.sections)))
    body = [
        '<header class="head"><h1></h1><button id="theme" type="button">Theme</button></header>',
        *(f'<p class="warning" role="alert">{escape(one)}</p>' for one in report.warnings),
        f'<dl class="facts">{"".join(_fact(name, value) for name, value in facts.items() if value)}</dl>',
        *(_section(section, numbers, colours) for section in report.sections),
        '<p class="foot">Drag over a chart to zoom, click twice to see all of it, click a name to hide its curve. '
        "Curves by uPlot (MIT licence, Leon Sorokin).</p>",
    ]
    body[0] = body[0].replace("<h1></h1>", f"<h1>{escape(report.title)}</h1>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{_policy(library, script, data)}'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(report.title)}</title><style>{style}</style></head><body>{''.join(body)}"
        f'<noscript>The charts need JavaScript.</noscript><script type="application/json" id="data">{_inert(data)}'
        f"</script><script>{library}</script><script>{script}</script></body></html>\n"
    )


def _policy(library: str, script: str, data: str) -> str:
    """The page's content security policy: these two scripts, by their hashes, and no other source."""
    hashes = " ".join(f"'sha256-{_hash(text)}'" for text in (library, script, _inert(data)))
    content = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:"
    return f'<meta http-equiv="content-security-policy" content="{content}">'


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _inert(data: str) -> str:
    """JSON that cannot close its enclosing element."""
    return data.replace("<", "\\u003c")


def _fact(name: str, value: str) -> str:
    wide = ' class="wide"' if name == "command" else ""
    shown = f"<code>{escape(value)}</code>" if name == "command" else escape(value)
    return f"<div{wide}><dt>{escape(name)}</dt><dd>{shown}</dd></div>"


def _section(section: Section, numbers: Any, colours: Mapping[str, str]) -> str:
    parts = [f"<section><h2>{escape(section.title)}</h2>", *(f"<p>{escape(note)}</p>" for note in section.notes)]
    parts += [_table(table, colours) for table in section.tables]
    charts = [
        f'<figure class="card"><figcaption>{escape(chart.title)}</figcaption><div data-chart="{next(numbers)}"></div>'
        "</figure>"
        for chart in section.charts
    ]
    pictures = [
        f'<figure class="card"><figcaption>{escape(one.title)}</figcaption>{one.svg}</figure>'
        for one in section.pictures
    ]
    shown = f'<div class="charts">{"".join(charts)}</div>' if charts else ""
    return "".join([*parts, shown, *pictures, "</section>"])


def _table(table: Table, colours: Mapping[str, str]) -> str:
    head = "".join(f'<th scope="col">{_key(colours.get(name))}{escape(name)}</th>' for name in table.columns)
    rows = []
    for row in table.rows:
        best = row.best()
        cells = "".join(
            f"<td{' class=best' if place in best else ''}>{escape(text)}</td>" for place, text in enumerate(row.texts)
        )
        rows.append(f'<tr><th scope="row">{escape(row.name)}</th>{cells}</tr>')
    marked = any(row.best() for row in table.rows)
    note = " ".join(part for part in (table.note, "The best of each row is marked." if marked else "") if part)
    caption = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    return (
        f'{caption}<div class="scroll card"><table><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(rows)}'
        f"</tbody></table></div>{f'<p class=note>{escape(note)}</p>' if note else ''}"
    )


def _key(colour: str | None) -> str:
    return "" if colour is None else f'<i class="key {colour}"></i> '


def _charts(report: Report, colours: Mapping[str, str]) -> list[dict[str, Any]]:
    return [_chart(chart, colours) for section in report.sections for chart in section.charts]


def _chart(chart: Chart, colours: Mapping[str, str]) -> dict[str, Any]:
    """A chart in the form that the page's script reads."""
    fallback = colours_of([one.label for one in chart.series if one.label not in PARTS])
    return {
        "x": {"label": chart.x_label, "log": chart.x_log},
        "y": {"label": chart.y_label, "log": chart.y_log, "zero": chart.zero_based},
        "group": chart.group,
        "empty": chart.empty,
        "names": list(chart.categories),
        "series": [
            {
                "label": one.label,
                "kind": one.kind,
                "color": PLAIN if one.kind == "dashed" else _colour(one.label, colours, fallback),
                "x": _rounded(one.x, X_DIGITS),
                "y": _rounded(one.y, Y_DIGITS),
            }
            for one in chart.series
        ],
    }


def _colour(label: str, colours: Mapping[str, str], fallback: Mapping[str, str]) -> str:
    setting, _, part = label.partition(SETTING_MARK)
    return PARTS.get(part) or colours.get(label) or colours.get(setting) or PARTS.get(label) or fallback[label]


def _rounded(values: Float64Array, digits: int) -> list[float]:
    """Values rounded to `digits` digits, as short as JSON writes them."""
    return [int(one) if one.is_integer() else one for one in (float(f"{value:.{digits}g}") for value in values)]


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """The theme's colour of each setting, by name.

    A setting has the same colour on every page: known names have a fixed one, others one by a hash of the name. Two
        settings of one page share a colour only if there are more than `SLOTS`.
    """
    found = {name: PARTS[name] for name in names if name in PARTS}
    wanted = {name: _KNOWN.index(name) if name in _KNOWN else crc32(name.encode()) % SLOTS for name in names}
    taken: set[int] = set()
    # Known names first, so that no other name takes the colour of one.
    for name in sorted(set(names) - found.keys(), key=lambda name: (name not in _KNOWN, names.index(name))):
        place = next((one for one in _from(wanted[name]) if one not in taken), wanted[name])
        taken.add(place)
        found[name] = f"s{place + 1}"
    return found


def _from(place: int) -> list[int]:
    return [(place + step) % SLOTS for step in range(SLOTS)]
