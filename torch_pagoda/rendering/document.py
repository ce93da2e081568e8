"""HTML files of a report: a document, and sections as tables."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .section import Section, as_styled, split_marks

_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --dim: #66707f; --line: #d6dbe2; --back: #fff; --soft: #f5f7f9;
  --good: #14733a; --bad: #b42318; --warn: #9a5b00; --edge: #8a94a3;
  --projection: #dbe7fb; --attention: #fde0d5; --norm: #dcf1e2; --rope: #ece2fb; --activation: #fdf0c8;
  --moe: #d7f0f2; --other: #eef0f3; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ee; --dim: #98a2b1; --line: #343c48; --back: #14181e;
  --soft: #1b2028; --good: #5fcf8b; --bad: #ff8a7a; --warn: #e9b252; --edge: #6c7685;
  --projection: #23395f; --attention: #5c2f20; --norm: #1e4a2d; --rope: #402a63; --activation: #554413;
  --moe: #174c51; --other: #2a303a; } }
body { font: 14px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--text);
  background: var(--back); margin: 0 auto; padding: 24px 32px 64px; max-width: 1800px; }
h1 { font-size: 22px; margin: 0 0 12px; } h2 { font-size: 16px; margin: 34px 0 8px; }
p { margin: 4px 0 8px; max-width: 75em; color: var(--dim); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 0; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); } .strong { font-weight: 600; }
.dim { color: var(--dim); }
table { border-collapse: collapse; } th, td { padding: 3px 14px 3px 0; text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid var(--line); color: var(--dim); }
tbody tr:nth-child(even) { background: var(--soft); } td.number, th.number { text-align: right; white-space: nowrap; }
td.line { white-space: nowrap; }
td.code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12.5px; }
.scroll { overflow-x: auto; } h1, h2, p { overflow-wrap: anywhere; }
@media (max-width: 600px) { body { padding: 12px 14px 40px; } dl { grid-template-columns: 1fr; }
  dd { margin-bottom: 6px; } }
"""


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """A self-contained HTML file.

    Args:
        title: title of the file.
        parts: HTML.
        style: CSS in addition to the style of text and tables.
    """
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}{style}</style></head><body>",
    ]
    return "\n".join((*head, *parts, "</body></html>")) + "\n"


def section_html(section: Section) -> list[str]:
    """A section as parts of a document."""
    parts = [f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in (section.hint, section.note) if text]
    if section.columns:
        parts.append(_table(section))
    return parts


def _table(section: Section) -> str:
    columns = [split_marks(column) for column in section.columns]
    kinds = [_kind(marks) for _, marks in columns]
    head = "".join(f'<th class="{kind}">{escape(name)}</th>' for (name, _), kind in zip(columns, kinds, strict=True))
    lines = []
    for row in section.rows:
        cells = []
        for cell, kind in zip(row, kinds, strict=True):
            text, style = as_styled(cell)
            text = text.replace(" +\n", " + ").replace("\n", "; ")
            cells.append(f'<td class="{f"{kind} {style}".strip()}">{escape(text)}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    # A table that is wider than the page scrolls by itself; tabindex lets the keyboard do it, too.
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _kind(marks: str) -> str:
    if "#" in marks:
        return "number"
    return " ".join(name for mark, name in (("`", "code"), ("!", "line")) if mark in marks)
