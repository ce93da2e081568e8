"""The report as tables for a terminal and a page, and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ...rendering.document import document, section_html
from ...rendering.section import Cell, Section, Styled
from .journal import NOT_RUN, RIGHT
from .numbers import number

if TYPE_CHECKING:
    from .report import Report

__all__ = ["page", "sections"]


def page(report: Report) -> str:
    """The complete page."""
    data = report.data
    style = "good" if report.is_right else "bad"
    facts = [("result", report.verdict, style), *((name, text, "") for name, text in _facts(data))]
    items = "".join(f'<dt>{escape(name)}</dt><dd class="{kind}">{escape(text)}</dd>' for name, text, kind in facts)
    first = "warn strong" if data["stand_in"] else ""
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        f'<p class="{first}">{escape(report.first_line)}</p>',
        f"<dl>{items}</dl>",
        *(part for section in sections(data) for part in section_html(section)),
    ]
    return document(report.title, parts)


def _facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    counts = ", ".join(f"{count} {status}" for status, count in data["counts"].items())
    return [
        ("items", counts + (", the run was resumed" if data.get("resumed") else "")),
        ("device", _named(data["device"])),
        ("model", _named(data["model"])),
        ("versions", _named(data.get("versions", {}))),
        ("options", _named(data.get("options", {}))),
        ("made", str(data.get("when", ""))),
    ]


def _named(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {text}" for name, text in facts.items())


def sections(data: Mapping[str, Any], *, short: bool = False) -> list[Section]:
    """The nonempty tables.

    Args:
        data: of a report.
        short: omit the long ones, for a terminal.
    """
    stages = data["stages"]
    operators = [outcome for outcome in stages.get("operators", []) if "(" in outcome["item"]]
    made = [
        _questions(data["answers"]),
        _wrong(stages),
        _operators(operators),
        _passes(stages.get("passes", [])),
        _graphs(stages.get("graphs", [])),
        _served(stages.get("ranks", [])),
        _exchanges(stages.get("ranks", [])),
    ]
    if not short:
        made += [
            _sizes([*stages.get("graphs", []), *stages.get("ranks", [])]),
            _calls(operators),
            _machine(data.get("doctor", [])),
        ]
    return [section for section in made if section.rows]


def _questions(found: Sequence[Mapping[str, str]]) -> Section:
    rows = [(each["question"], Styled(each["answer"], _style(each["status"]))) for each in found]
    return Section("Questions for hardware", ("question", "answer"), tuple(rows))


def _wrong(stages: Mapping[str, Sequence[Mapping[str, Any]]]) -> Section:
    rows: list[tuple[Cell, ...]] = []
    left = 0
    for name, outcomes in stages.items():
        for outcome in outcomes:
            status = outcome["status"]
            if status == RIGHT:
                continue
            if status == NOT_RUN and rows and rows[-1][0] == name and rows[-1][1] == Styled(status, _style(status)):
                left += 1
                continue
            rows.append((name, Styled(status, _style(status)), outcome["item"], outcome["reason"]))
    note = f"{left} more items, each after one of these, were not run for the same reason." if left else ""
    return Section("Failures, in the order of the run", ("stage", "what!", "item`", "why"), tuple(rows), note)


def _operators(outcomes: Sequence[Mapping[str, Any]]) -> Section:
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for outcome in outcomes:
        by_name.setdefault(outcome["item"].partition("(")[0], []).append(outcome)
    rows = []
    for name, group in by_name.items():
        right = sum(outcome["status"] == RIGHT for outcome in group)
        worst = max((outcome["found"] for outcome in group), key=lambda found: number(found.get("of_limit", 0)))
        style = "" if right == len(group) else "bad"
        rows.append(
            (
                Styled(name, style),
                f"{right} of {len(group)}",
                Styled(_short(worst.get("of_limit", "")), style),
                _short(worst.get("largest", "")),
                _spread(
                    [outcome["found"]["microseconds"] for outcome in group if "microseconds" in outcome["found"]]
                ),
            )
        )
    return Section(
        "Operators",
        ("operator`", "right#", "of the limit#", "largest difference#", "microseconds#"),
        tuple(rows),
        hint=(
            "Each call of the lowered graphs with distinct sizes, the model's own, with the same inputs as on the "
            "CPU. Limits: two roundings of the dtype, relative to the number and to the root mean square of its "
            "row. Times are those of a single call, its launch included."
        ),
    )


def _spread(times: Sequence[float]) -> str:
    if not times:
        return ""
    least, most = min(times), max(times)
    return f"{least:.0f}" if least == most else f"{least:.0f} to {most:.0f}"


def _calls(outcomes: Sequence[Mapping[str, Any]]) -> Section:
    rows = []
    for outcome in outcomes:
        found, style = outcome["found"], _style(outcome["status"])
        if "of_limit" not in found:
            continue
        rows.append(
            (
                Styled(found["operator"], style),
                found["shapes"] + (", FRACTAL_NZ" if found.get("fractal_nz") else ""),
                found["step"],
                str(found["calls"]),
                Styled(_short(found["of_limit"]), style),
                f"{found['microseconds']:.0f}",
            )
        )
    columns = ("operator`", "tensors`", "step!", "calls#", "of the limit#", "microseconds#")
    return Section("All compared calls", columns, tuple(rows))


def _passes(outcomes: Sequence[Mapping[str, Any]]) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for outcome in outcomes:
        if "error" in outcome["found"]:
            style = _style(outcome["status"])
            rows.append((outcome["item"], Styled(_short(outcome["found"]["error"]), style), outcome["reason"]))
        for check in outcome["found"].get("checks", []):
            style = "bad" if check["reason"] else ""
            rows.append((Styled(check["name"], style), Styled(_short(check["error"]), style), check["reason"]))
    limit = next((outcome["found"]["limit"] for outcome in outcomes if "limit" in outcome["found"]), None)
    note = (
        ""
        if limit is None
        else f"Errors are in standard deviations of a row of logits; the limit is {_short(limit)}."
    )
    return Section("Pass by pass", ("pass`", "error#", ""), tuple(rows), note)


def _graphs(outcomes: Sequence[Mapping[str, Any]]) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for outcome in outcomes:
        found = outcome["found"]
        off, on = found.get("off", {}), found.get("on", {})
        name = Styled(outcome["item"], _style(outcome["status"]) if outcome["status"] != RIGHT else "")
        times = [f"{side['milliseconds']:.3g}" if "milliseconds" in side else "" for side in (off, on)]
        faster = f"{found['times']:.2f}" if "times" in found else outcome["status"]
        same = f"{found['same_tokens']} of {found['sequences']}" if "same_tokens" in found else ""
        sizes = on.get("sizes", [])
        right = f"{sum(not size['reason'] for size in sizes)} of {len(sizes)}" if sizes else ""
        rows.append((name, *times, faster, same, right))
    columns = ("with and without", "ms without#", "ms with#", "speedup#", "same tokens#", "sizes right#")
    hint = "Milliseconds of a decode step, medians of alternating runs over the same weights."
    return Section("Ways to run the graph", columns, tuple(rows), hint=hint)


def _served(outcomes: Sequence[Mapping[str, Any]]) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for outcome in outcomes:
        found, status = outcome["found"], outcome["status"]
        if "exchanges" in found or "same_tokens" not in found:
            continue
        sizes = found.get("sizes", [])
        rows.append(
            (
                Styled(outcome["item"], "" if status == RIGHT else _style(status)),
                f"{found['milliseconds']:.3g}",
                f"{found['same_tokens']} of {found['sequences']}",
                f"{sum(not size['reason'] for size in sizes)} of {len(sizes)}" if sizes else "",
                str(found["steps_ahead"]),
            )
        )
    columns = ("by", "ms of a decode step#", "same tokens#", "sizes right#", "steps ahead#")
    hint = "Tokens are compared with those of transformers on the CPU."
    return Section("Served by several ranks", columns, tuple(rows), hint=hint)


def _exchanges(outcomes: Sequence[Mapping[str, Any]]) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for outcome in outcomes:
        for each in outcome["found"].get("exchanges", []):
            rows.append(
                (
                    Styled(each["kind"], "bad" if each["wrong"] else ""),
                    f"{each['dtype']}[{each['rows']}, {each['width']}]",
                    f"{each['microseconds']:.0f}",
                    f"{each['gigabytes_per_second']:.3g}",
                    _yes(each.get("repeats")),
                    _yes(each.get("in_order")),
                )
            )
    columns = ("exchange`", "of each rank`", "microseconds#", "GB/s#", "same bits again", "bits of a sum in order")
    hint = "GB/s: the bytes of one rank's tensor in that time. In order: that of the ranks, in float32."
    return Section("Exchanges of the ranks", columns, tuple(rows), hint=hint)


def _yes(found: bool | None) -> str:
    return "" if found is None else "yes" if found else "no"


def _sizes(outcomes: Sequence[Mapping[str, Any]]) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for outcome in outcomes:
        for size in outcome["found"].get("on", outcome["found"]).get("sizes", []):
            style = "bad" if size["reason"] else ""
            rows.append(
                (
                    outcome["item"],
                    Styled(size["name"], style),
                    Styled(_short(size["error"]), style),
                    f"{size['seconds']:.1f}",
                    size["reason"],
                )
            )
    columns = ("with", "size", "error#", "seconds#", "")
    return Section("Planned sizes, each compared with its operators called one by one", columns, tuple(rows))


def _machine(findings: Sequence[Mapping[str, Any]]) -> Section:
    styles = {"ok": "good", "problem": "bad", "not known": "warn"}
    rows = [
        (Styled(each["status"], styles.get(each["status"], "")), each["check"], each["text"], each["remedy"])
        for each in findings
    ]
    return Section("The machine, from pagoda npu doctor", ("!", "check!", "found", "what to do"), tuple(rows))


def _style(status: str) -> str:
    return {RIGHT: "good", NOT_RUN: "warn"}.get(status, "bad")


def _short(number: float | str) -> str:
    return number if isinstance(number, str) else f"{number:.3g}"
