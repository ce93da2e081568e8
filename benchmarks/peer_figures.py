"""What the runs of ``peers.py`` say: rates, fractions of the machine's limits, tables and plots."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from limits import layer_matrices
from report import markdown_table, plotter, save_plot
from shapes import (
    ALL_SHAPES,
    DECODE_TOKENS,
    EXPERT_SHAPES,
    OUTPUT_LENGTHS,
    PREFILL_PROMPT,
    PROMPT_LENGTHS,
    attention_layers,
    head_dim,
)

DECODE, TTFT, PREFILL, OFFLINE = "decode (tok/s)", "TTFT 128 (ms)", "prefill 1024 (tok/s)", "32 requests (tok/s)"
COLD, WARM, MEMORY = "first token, cold (s)", "first token, warm (s)", "memory (MB)"
FIGURES = (DECODE, TTFT, PREFILL, OFFLINE, COLD, WARM, MEMORY)
LESS_IS_BETTER = frozenset((TTFT, COLD, WARM, MEMORY))
COLUMNS = ("", DECODE, "of read", TTFT, PREFILL, "of GEMM", OFFLINE, "of ceiling", COLD, WARM, MEMORY)


def figures(side: Mapping[str, Any]) -> dict[str, list[float]]:
    """Of one side: of each round, or one for the whole run; empty where nothing was measured."""
    seconds = side.get("seconds") or {phase: [] for phase in ("decode", "first", "prefill", "offline")}
    pairs = zip(seconds["decode"], seconds["first"], strict=False)
    found = {
        DECODE: [(DECODE_TOKENS - 1) / (whole - first) for whole, first in pairs],
        TTFT: [1e3 * s for s in seconds["first"]],
        PREFILL: [PREFILL_PROMPT / s for s in seconds["prefill"]],
        OFFLINE: [sum(OUTPUT_LENGTHS) / s for s in seconds["offline"]],
    }
    for figure, key in ((COLD, "first_token_cold"), (WARM, "first_token_warm"), (MEMORY, "peak_rss_mb")):
        found[figure] = [side[key]] if key in side else []
    return found


def read_bytes(shape: str, bits: float, head_bits: float) -> float:
    """Bytes of matrices that one decoded token reads: the layers' and the head's, tied or not."""
    config = ALL_SHAPES[shape]()
    layers = sum(rows * width for rows, width in layer_matrices(shape))
    return (layers * bits + config.vocab_size * config.hidden_size * head_bits) / 8


def prefill_flops(shape: str, tokens: int) -> float:
    """Of the layers' matrix products of a prompt, and of the head's of its last token; attention's are left out."""
    config = ALL_SHAPES[shape]()
    layers = sum(rows * width for rows, width in layer_matrices(shape))
    return 2.0 * (layers * tokens + config.vocab_size * config.hidden_size)


def prompt_flops(shape: str, tokens: int) -> float:
    """The same with attention's products, of its causal half; those of recurrences are left out."""
    config = ALL_SHAPES[shape]()
    attention = 4 * config.num_attention_heads * head_dim(config) * tokens * (tokens + 1) / 2
    return prefill_flops(shape, tokens) + attention_layers(config) * attention


def cache_bytes(shape: str) -> int:
    """Bytes of keys and values, in bf16, that decoding the 32 requests reads; states are left out."""
    config = ALL_SHAPES[shape]()
    per_token = 2 * 2 * attention_layers(config) * config.num_key_value_heads * head_dim(config)
    seen = sum(prompt + n for prompt, out in zip(PROMPT_LENGTHS, OUTPUT_LENGTHS, strict=True) for n in range(1, out))
    return seen * per_token


def fractions(run: Mapping[str, Any], label: str) -> dict[str, float]:
    """Of the limits that were measured in the same run: what one side reaches by decoding, prefill, 32 requests.

    None of a model with experts.
    """
    if run["shape"] in EXPERT_SHAPES:
        return {}
    side = run["sides"][label]
    median = {figure: statistics.median(found) for figure, found in figures(side).items() if found}
    limits = run.get("limits", [])
    found = {}
    if limits and DECODE in median:
        read = 1e9 * statistics.mean(limit["read_gb_per_s"] for limit in limits)
        found["of read"] = median[DECODE] * read_bytes(run["shape"], side["bits"], side["head_bits"]) / read
    if limits and PREFILL in median:
        gemm = 1e9 * statistics.mean(limit["gemm_gflops"] for limit in limits)
        seconds = PREFILL_PROMPT / median[PREFILL]
        found["of GEMM"] = prefill_flops(run["shape"], PREFILL_PROMPT) / seconds / gemm
    if "ceiling" in run and OFFLINE in median:
        found["of ceiling"] = median[OFFLINE] / run["ceiling"]
    return found


def ratios(run: Mapping[str, Any], ours: str, theirs: str) -> dict[str, list[float]]:
    """Round by round, above 1 in favor of ours; of the figures that both have."""
    a, b = figures(run["sides"][ours]), figures(run["sides"][theirs])
    return {
        figure: [
            (x / y) ** (-1 if figure in LESS_IS_BETTER else 1) for x, y in zip(a[figure], b[figure], strict=False)
        ]
        for figure in FIGURES
        if a[figure] and b[figure]
    }


def pairs(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Ours and theirs that both came to the end."""
    ended = {label: side["name"] for label, side in run["sides"].items() if "failed" not in side}
    for theirs in [label for label, name in ended.items() if name != "ours"]:
        for ours in [label for label, name in ended.items() if name == "ours"]:
            yield ours, theirs


def _side_row(run: Mapping[str, Any], label: str) -> list[object]:
    side = run["sides"][label]
    if "failed" in side:
        reason = " ".join(side["failed"].split()).replace("|", "\\|")
        return [f"{label} **failed**: {reason}", *[""] * (len(COLUMNS) - 1)]
    median = {figure: statistics.median(found) for figure, found in figures(side).items() if found}
    share = {column: f"{found:.0%}" for column, found in fractions(run, label).items()}
    return [label, *((median | share).get(column, "") for column in COLUMNS[1:])]


def _ratio_row(run: Mapping[str, Any], ours: str, theirs: str) -> list[object]:
    cells = {}
    for figure, found in ratios(run, ours, theirs).items():
        spread = f" ({min(found):.2f}–{max(found):.2f})" if len(found) > 1 else ""
        cells[figure] = f"**{statistics.median(found):.2f}×**{spread}"
    return [f"{ours} : {theirs}", *(cells.get(column, "") for column in COLUMNS[1:])]


def by_kind(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, int], list[Mapping[str, Any]]]:
    """The runs of each shape, width and number of threads."""
    found: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for run in runs:
        found.setdefault((run["shape"], run["weights"], run["threads"]), []).append(run)
    return found


def tables(runs: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table for each shape and width: medians of the rounds, run by run, ratios after the sides."""
    lines = []
    for (shape, weights, threads), of_kind in by_kind(runs).items():
        rows, limits = [], []
        for run in of_kind:
            rows += [_side_row(run, label) for label in run["sides"]]
            rows += [_ratio_row(run, *pair) for pair in pairs(run)]
            if run.get("limits"):
                limits.append(_limits_of(run))
        lines += [f"### {shape}, {weights}, {threads} threads\n", markdown_table(COLUMNS, rows)]
        lines.append("A ratio above 1 is in favor of torch-pagoda. Limits in the same runs:\n")
        lines += [*limits, ""]
    return "\n".join(lines)


def _limits_of(run: Mapping[str, Any]) -> str:
    read = statistics.mean(found["read_gb_per_s"] for found in run["limits"])
    gemm = statistics.mean(found["gemm_gflops"] for found in run["limits"])
    others = ", ".join(label for label, side in run["sides"].items() if side["name"] != "ours")
    dtype = " in float32" if any(found.get("gemm_dtype") == "float32" for found in run["limits"]) else ""
    text = f"- beside {others}: read {read:.1f} GB/s, GEMM {gemm:.0f} GFLOP/s{dtype}"
    if run["shape"] in EXPERT_SHAPES:
        return text
    prefill = [
        PREFILL_PROMPT * 1e9 * gemm / count(run["shape"], PREFILL_PROMPT) for count in (prefill_flops, prompt_flops)
    ]
    text += f", prefill {prefill[0]:.0f} tok/s ({prefill[1]:.0f} where attention is multiplied, too)"
    if "ceiling" in run:
        tokens = sum(OUTPUT_LENGTHS)
        with_cache = tokens / (tokens / run["ceiling"] + cache_bytes(run["shape"]) / (1e9 * read))
        text += f", 32 requests {run['ceiling']:.1f} tok/s ({with_cache:.1f} where keys and values are read, too)"
    return text


def plot(runs: Sequence[Mapping[str, Any]], out: Path | None) -> None:
    """A figure for each shape and width: bars of the ratios, those of one pair in one color."""
    plt = plotter(out)
    if plt is None or out is None:
        return
    for (shape, weights, _), of_kind in by_kind(runs).items():
        found = [(pair, ratios(run, *pair)) for run in of_kind for pair in pairs(run)]
        if not found:
            continue
        figure, axes = plt.subplots(figsize=(12, 5))
        width = 0.8 / len(found)
        for i, ((ours, theirs), of_pair) in enumerate(found):
            for j, name in enumerate(FIGURES):
                values = of_pair.get(name)
                if not values:
                    continue
                median = statistics.median(values)
                spread = [[median - min(values)], [max(values) - median]]
                bar = axes.bar(j + (i - (len(found) - 1) / 2) * width, median, width, color=f"C{i}", yerr=spread)
                if name == FIGURES[0]:
                    bar.set_label(f"{ours} : {theirs}")
        axes.axhline(1, color="black", linewidth=1)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}×")
        axes.set_xticks(range(len(FIGURES)), FIGURES, rotation=15)
        axes.set_title(f"{shape}, {weights}: torch-pagoda beside its peers; above 1× ours is better")
        axes.legend()
        save_plot(plt, figure, out / f"peers-{shape}-{weights}.png")
