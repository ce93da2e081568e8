"""Questions that only hardware can answer, and the answers of a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .journal import NOT_RUN, RIGHT
from .numbers import number
from .rank_items import BROKEN, KINDS, WAYS
from .supervise import PREPARE

__all__ = ["QUESTIONS", "Question", "answers"]

Outcomes = Mapping[str, Sequence[Mapping[str, Any]]]
"""Stage → its outcomes as data."""


@dataclass(frozen=True)
class Question:
    """A question, and how to answer it.

    Attributes:
        text: the question.
        stage: the stage that answers it.
        of: selects the outcomes.
        says: makes the answer from them.
    """

    text: str
    stage: str
    of: Callable[[Mapping[str, Any]], bool]
    says: Callable[[Sequence[Mapping[str, Any]]], str]


def _named(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda outcome: outcome["item"] in (PREPARE, *names)


def _operator(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda outcome: outcome["item"].partition("(")[0] in names


def _around_windows(outcome: Mapping[str, Any]) -> bool:
    return " around a window of " in outcome["item"]


def _reads_packed_weights(outcome: Mapping[str, Any]) -> bool:
    item = outcome["item"]
    is_grouped = _operator("npu_grouped_matmul")(outcome) and ("int8[" in item or "int32[" in item)
    others = ("npu_weight_quant_batchmatmul", "npu_quant_matmul", "npu_grouped_matmul_swiglu_quant_v2")
    return is_grouped or _operator(*others)(outcome)


def _limits(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """How many are right, and the largest difference; "" if none was run."""
    if not outcomes:
        return ""
    found = [number(outcome["found"]["of_limit"]) for outcome in outcomes if "of_limit" in outcome["found"]]
    right = f"{sum(outcome['status'] == RIGHT for outcome in outcomes)} of {len(outcomes)} calls are right"
    if not found:
        return right
    if max(found) == float("inf"):
        return f"{right}; a result is not a number, or has the wrong shape"
    return f"{right}; the largest difference: {max(found):.3g} times the limit"


def _checks(outcomes: Sequence[Mapping[str, Any]]) -> str:
    checks = [check for outcome in outcomes for check in outcome["found"].get("checks", [])]
    worst = max((number(check["error"]) for check in checks), default=0.0)
    if not checks:
        return ""
    limit = next((outcome["found"]["limit"] for outcome in outcomes if "limit" in outcome["found"]), None)
    of = f" of {number(limit):.3g} standard deviations" if limit is not None else ""
    return f"passes compared: {len(checks)}; the largest error: {worst:.3g}{of}"


def _graphs(outcomes: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(filter(None, map(_graph, outcomes)))


def _graph(outcome: Mapping[str, Any]) -> str:
    """How many sizes are right, and the time of a decode step with and without it; "" if neither is known."""
    found = outcome["found"]
    made = found.get("on", {})
    sizes = made.get("sizes", [])
    parts = []
    if sizes:
        parts.append(f"{sum(not size['reason'] for size in sizes)} of {len(sizes)} sizes are right")
    parts += made.get("limits", [])
    if "times" in found:
        off, on = found["off"]["milliseconds"], found["on"]["milliseconds"]
        parts.append(
            f"a decode step takes {on:.3g} ms with it, {off:.3g} ms without: a speedup of {found['times']:.2f}; "
            f"{found['same_tokens']} of {found['sequences']} sequences have the same tokens"
        )
    return f"{outcome['item']}: {', '.join(parts)}" if parts else ""


def _exchanges(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """How many exchanges are right, and what sums have in common with those of ranks on CPUs."""
    found = [each for outcome in outcomes for each in outcome["found"].get("exchanges", [])]
    if not found:
        return ""
    parts = [f"{sum(not each['wrong'] for each in found)} of {len(found)} are right"]
    for name, words in (
        ("repeats", "the same bits a second time"),
        ("in_order", "the bits of a sum in the order of the ranks"),
    ):
        sums = [each[name] for each in found if name in each]
        if sums:
            parts.append(f"{sum(sums)} of {len(sums)} sums have {words}")
    return "; ".join(parts)


def _ranks(outcomes: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(filter(None, map(_served, outcomes)))


def _served(outcome: Mapping[str, Any]) -> str:
    """Of an engine of several ranks: its sizes, tokens, and the time of a decode step."""
    found = outcome["found"]
    sizes = found.get("sizes", [])
    parts = []
    if sizes:
        parts.append(f"{sum(not size['reason'] for size in sizes)} of {len(sizes)} sizes are right")
    if "same_tokens" in found:
        parts.append(f"{found['same_tokens']} of {found['sequences']} sequences have transformers' tokens")
        parts.append(f"a decode step takes {found['milliseconds']:.3g} ms")
    return f"{outcome['item']}: {', '.join(parts)}" if parts else ""


def _failure(outcomes: Sequence[Mapping[str, Any]]) -> str:
    found = outcomes[0]["found"] if outcomes else {}
    if not found.get("error"):
        return ""
    return f"after {found['seconds_until_error']:.3g} s: {found['error']}"


QUESTIONS = (
    Question(
        "Do the operators match their CPU semantics?",
        "operators",
        lambda outcome: "FRACTAL_NZ" not in outcome["item"],
        _limits,
    ),
    Question("Is attention right around the window sizes of the model?", "operators", _around_windows, _limits),
    Question(
        "Are products with matrices in FRACTAL_NZ right?",
        "operators",
        lambda outcome: "FRACTAL_NZ" in outcome["item"],
        _limits,
    ),
    Question(
        "Are packed weights of 4 and 8 bits read correctly?",
        "operators",
        _reads_packed_weights,
        _limits,
    ),
    Question(
        "Are the decays of gated delta rules right?",
        "operators",
        _operator("npu_chunk_gated_delta_rule", "npu_recurrent_gated_delta_rule"),
        _limits,
    ),
    Question("Is the model right on the device, pass by pass?", "passes", _named("pass by pass"), _checks),
    Question("Does GE compile the planned graphs, and are they right?", "graphs", _named("graph engine"), _graphs),
    Question("Are captures right, and how many fit?", "graphs", _named("captured graphs"), _graphs),
    Question(
        "Are static decode graphs right, and what do they gain? Only a profile shows whether they are launched as a "
        "whole.",
        "graphs",
        _named("static decode graphs"),
        _graphs,
    ),
    Question("Does a second stream for branches pay, and is it right?", "graphs", _named("streams"), _graphs),
    Question("Does it pay to prefetch weights?", "graphs", _named("prefetch"), _graphs),
    Question("Do matrices in FRACTAL_NZ pay?", "graphs", _named("FRACTAL_NZ"), _graphs),
    Question(
        "Which block size is fastest?",
        "graphs",
        lambda outcome: outcome["item"].startswith("blocks of"),
        _graphs,
    ),
    Question(
        "What do static kernels and super kernels gain, and are they right?",
        "graphs",
        _named("static kernels", "super kernels", "super kernels of the graph engine"),
        _graphs,
    ),
    Question("Do the ranks meet, and are their exchanges right?", "ranks", _named(*KINDS), _exchanges),
    Question(
        "Do the ranks serve the model's tokens, with captures and graphs that hold exchanges?",
        "ranks",
        _named(*WAYS),
        _ranks,
    ),
    Question("Do all ranks end, with an error, when one does?", "ranks", _named(BROKEN), _failure),
)


def answers(stages: Outcomes) -> list[dict[str, str]]:
    """For each question with outcomes: the question, the answer, and "right" or the status of the first outcome that
    is not."""
    said = []
    for question in QUESTIONS:
        outcomes = [outcome for outcome in stages.get(question.stage, ()) if question.of(outcome)]
        if not outcomes:
            continue
        bad = [outcome for outcome in outcomes if outcome["status"] != RIGHT]
        ran = [outcome for outcome in outcomes if outcome["status"] != NOT_RUN]
        text = question.says(ran)
        if bad:
            first = f"{bad[0]['item']}: {bad[0]['status']}, {bad[0]['reason']}"
            text = f"{text}. First failure: {first}" if text else first
        said.append(
            {"question": question.text, "answer": text or RIGHT, "status": bad[0]["status"] if bad else RIGHT}
        )
    return said
