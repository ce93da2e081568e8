"""Output of ``pagoda generate``: texts or JSON lines to stdout, a summary and statistics to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

if TYPE_CHECKING:
    from ..runtime.requests.outputs import Logprob, RequestOutput

_RATIOS = ("utilization", "internal_fragmentation", "prefix_hit_rate")


def print_outputs(outputs: Sequence[RequestOutput], as_json: bool, scores: list[list[float]] | None) -> None:
    """Print texts, or one JSON object per prompt and line.

    Args:
        outputs: in the order of the prompts.
        as_json: print JSON.
        scores: scores of the completions of a beam search, best first.
    """
    if as_json:
        for index, output in enumerate(outputs):
            line = _as_dict(index, output)
            for entry, score in zip(line["outputs"], scores[index] if scores else (), strict=False):
                entry["score"] = score
            print(json.dumps(line, ensure_ascii=False))
        return
    for index, output in enumerate(outputs):
        if index:
            print()
        for completion in output.outputs:
            prompt = output.prompt or ""
            print((typer.style(prompt, dim=True) if sys.stdout.isatty() else prompt) + completion.text)
            if completion.finish_reason == "error":
                typer.echo(f"pagoda: prompt {index} failed: {completion.error}", err=True)
            if completion.finish_reason == "timeout":
                typer.echo(f"pagoda: prompt {index} reached its deadline and is not complete", err=True)


def _as_dict(index: int, output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    result: dict[str, Any] = {
        "index": index,
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "outputs": [
            {
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "error": completion.error,
                **({} if completion.logprobs is None else {"logprobs": _logprobs(completion.logprobs)}),
            }
            for completion in output.outputs
        ],
        "time_to_first_token": metrics.ttft,
        "latency": metrics.e2e_latency,
    }
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
    return result


def _logprobs(entries: Sequence[Mapping[int, Logprob] | None]) -> list[dict[int, dict[str, Any]] | None]:
    return [
        None if entry is None else {token: asdict(logprob) for token, logprob in entry.items()} for entry in entries
    ]


def print_summary(outputs: Sequence[RequestOutput], seconds: float) -> None:
    """One line on stderr: the number of tokens, and the throughput."""
    tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    rate = tokens / seconds if seconds else 0.0
    noun = "prompt" if len(outputs) == 1 else "prompts"
    typer.echo(f"{len(outputs)} {noun}, {tokens} tokens in {seconds:.1f} s ({rate:.1f} tok/s)", err=True)


def stats_table(stats: Mapping[str, int | float]) -> Table:
    """Statistics of ``LLM.stats``, one per row, as a table of at most 80 columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in stats.items():
        if name in _RATIOS:
            shown = f"{100 * value:.1f} %"
        else:
            shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        table.add_row(name, shown)
    return table
