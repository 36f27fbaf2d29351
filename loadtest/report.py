"""A report's directory: one self-contained page, the records, and the figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from loadtest.figures import ALL, COLUMNS, Column, Slo, Summary, complaints, summaries
from loadtest.records import RECORDS, Record, write_records
from loadtest.table import note, versus, views

__all__ = ["PAGE", "SUMMARY", "write_comparison", "write_report"]

PAGE, SUMMARY = "report.html", "summary.json"
_FORM = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 14px/1.45 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em; color: #1c1c1e; }}
h1 {{ font-size: 1.4em; margin-bottom: 0; }}
h2 {{ font-size: 1.2em; margin-top: 2em; }}
h3 {{ font-size: 1em; margin: 1.5em 0 0.3em; }}
p.note, figcaption {{ color: #555; font-size: 0.9em; }}
p.bad {{ background: #c62828; color: white; padding: 0.5em 0.8em; font-weight: 600; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.2em 0.7em; text-align: right; white-space: nowrap; border-bottom: 1px solid #e3e3e6; }}
th:nth-child(-n+{names}), td:nth-child(-n+{names}) {{ text-align: left; }}
tr.total td {{ font-weight: 600; }}
figure {{ margin: 1.5em 0; }}
svg {{ width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="note">{about}</p>
{body}
</body>
</html>
"""


def write_report(
    directory: Path, records: Sequence[Record], slo: Slo, about: Mapping[str, Any], *, bare: bool = False
) -> Path:
    """Write the report of one run into `directory`, made where it does not exist; the page.

    about: what was run, name -> value; it heads the page and stands in the JSON. bare: see figures.complaints.
    """
    from loadtest.plots import pictures

    found = summaries(records, slo)
    protocols = list(dict.fromkeys(one.protocol for one in sorted(records, key=lambda one: one.protocol)))
    runs = {name: [one for one in records if one.protocol == name] for name in protocols}
    body = [f'<p class="bad">{escape(line)}</p>' for line in complaints(records, bare=bare)]
    body += _tables([one for one in found if ALL in (one.workload, one.protocol)])
    body += [_note(note(slo, found[0])), "<h2>Pictures</h2>", *_figures(pictures(runs))]
    single = [one for one in found if ALL not in (one.workload, one.protocol)]
    if single:
        body += ["<h2>Each class over each protocol</h2>", *_tables(single)]
    directory.mkdir(parents=True, exist_ok=True)
    write_records(directory / RECORDS, records)
    tree = {"about": dict(about), "slo": asdict(slo), "summaries": [asdict(one) for one in found]}
    (directory / SUMMARY).write_text(json.dumps(tree, indent=1) + "\n")
    return _write(directory, "dsde load test", about, body, names=2)


def write_comparison(
    directory: Path, runs: Mapping[str, Sequence[Record]], pairs: Sequence[tuple[Summary, Summary]], slo: Slo
) -> Path:
    """Write the page of two runs side by side; the page. runs: the two, by name. pairs: their summaries by group."""
    from loadtest.plots import pictures

    first, second = runs
    head = "".join(f"<th>{escape(one)}</th>" for one in ("class", "protocol", "figure", first, second, "ratio"))
    rows = []
    for pair in pairs:
        for column in COLUMNS:
            cells = (pair[0].workload, pair[0].protocol, column.title, *(column.text(one) for one in pair))
            text = "".join(f"<td>{escape(one)}</td>" for one in (*cells, versus(column.value, pair)))
            rows.append(f"<tr>{text}</tr>")
    body = [f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>', _note(note(slo, pairs[0][0]))]
    body += ["<h2>Pictures</h2>", *_figures(pictures(runs))]
    directory.mkdir(parents=True, exist_ok=True)
    return _write(directory, "dsde load test, two runs", {"first": first, "second": second}, body, names=3)


def _tables(found: Sequence[Summary]) -> list[str]:
    return [f"<h3>{title}</h3>{_table(found, columns)}" for title, columns in views()]


def _table(found: Sequence[Summary], columns: Sequence[Column]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in ("class", "protocol", *(column.title for column in columns)))
    rows = []
    for one in found:
        cells = (one.workload, one.protocol, *(column.text(one) for column in columns))
        text = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr class="total">{text}</tr>' if one.workload == one.protocol == ALL else f"<tr>{text}</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _figures(drawn: Sequence[tuple[str, str]]) -> list[str]:
    return [f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" for caption, svg in drawn]


def _write(directory: Path, title: str, about: Mapping[str, Any], body: Sequence[str], names: int) -> Path:
    page = directory / PAGE
    said = ", ".join(f"{name} {value}" for name, value in about.items() if value not in (None, ""))
    page.write_text(_FORM.format(title=escape(title), about=escape(said), names=names, body="\n".join(body)))
    return page
