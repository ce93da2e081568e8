"""What prefix caching does to the time to the first token: a shared prefix, and a chat that grows turn by turn.

    python benchmarks/prefix_cache.py --out results
    python benchmarks/prefix_cache.py --prefix 64 --layers 2 --repeats 1 --turns 3 --questions 2     # a quick look

Shared prefix: a prefix of ``--prefix`` tokens, then ``--questions`` requests one after the other, each the prefix and
``--suffix`` tokens of its own. The first finds nothing cached (cold), the others the prefix (warm). Then as many
requests at once. Each repeat has a new prefix.

Chat: each turn's prompt is all that was said before, the model's answers included, and ``--message`` new tokens; the
model answers with ``--answer`` tokens. Only the message, and what does not fill a block, has to be computed.

Two engines over one model, with ``enable_prefix_caching`` on and off, get the same prompts in turn; medians over
repeats. Their tokens are compared: "same tokens" is the share of the answers that are equal. In bfloat16 near-ties
between tokens may fall either way, since what is computed at once differs; ``--dtype float32`` shows no difference.
The hit rate is that of the requests named: cached tokens / prompt tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from random_llama import greedy, random_llama, warm_up
from report import add_arguments, conditions, markdown_table, plotter, save, save_plot
from workloads import random_prompt

from torch_pagoda import LLM, RequestOutput

TARGET = 5.0


@dataclass(frozen=True)
class Answer:
    """What matters of one request's output: seconds to the first token, tokens, and how much of it was cached."""

    ttft: float
    tokens: tuple[int, ...]
    cached: int
    prompt: int

    @classmethod
    def of(cls, output: RequestOutput) -> Answer:
        assert output.metrics.ttft is not None, output.outputs[0].error
        return cls(
            output.metrics.ttft,
            tuple(output.outputs[0].token_ids),
            output.num_cached_tokens,
            len(output.prompt_token_ids),
        )


def ask(llm: LLM, prompts: list[list[int]], count: int) -> list[Answer]:
    """Serve the prompts at once."""
    return [Answer.of(output) for output in llm.generate(prompts, greedy(count))]


def hit_rate(answers: list[Answer]) -> float:
    return sum(answer.cached for answer in answers) / sum(answer.prompt for answer in answers)


def median_ms(answers: list[Answer]) -> float:
    return 1e3 * statistics.median(answer.ttft for answer in answers)


def shared_prefix(
    llms: dict[str, LLM], prefix: int, suffix: int, questions: int, repeats: int, generator: torch.Generator
) -> dict[str, dict[str, dict[str, float]]]:
    """TTFT in ms and hit rate of the cold, the warm and the simultaneous requests, with the cache on and off."""
    answers: dict[str, dict[str, list[Answer]]] = {side: {"cold": [], "warm": [], "at once": []} for side in llms}
    for _ in range(repeats):
        head, other = random_prompt(prefix, generator), random_prompt(prefix, generator)
        asked = [head + random_prompt(suffix, generator) for _ in range(questions)]
        together = [other + random_prompt(suffix, generator) for _ in range(questions)]
        for side, llm in llms.items():
            found = answers[side]
            found["cold"] += ask(llm, asked[:1], 4)
            for prompt in asked[1:]:
                found["warm"] += ask(llm, [prompt], 4)
            found["at once"] += ask(llm, together, 4)
    return {
        side: {
            kind: {
                "ttft_ms": median_ms(each),
                "hit_rate": hit_rate(each),
                "same_tokens": same_share(each, answers["off"][kind]),
            }
            for kind, each in found.items()
        }
        for side, found in answers.items()
    }


def same_share(answers: list[Answer], expected: list[Answer]) -> float:
    """Share of the answers whose tokens are the expected ones."""
    return statistics.fmean(a.tokens == b.tokens for a, b in zip(answers, expected, strict=True))


def chat(
    llms: dict[str, LLM], turns: int, message: int, answer: int, repeats: int, generator: torch.Generator
) -> dict[str, list[dict[str, float]]]:
    """Per turn: tokens of the prompt, median TTFT in ms, hit rate; with the cache on and off."""
    answers: dict[str, list[list[Answer]]] = {side: [[] for _ in range(turns)] for side in llms}
    for _ in range(repeats):
        messages = [random_prompt(message, generator) for _ in range(turns)]
        histories: dict[str, list[int]] = {side: [] for side in llms}
        for turn, new in enumerate(messages):
            for side, llm in llms.items():
                prompt = histories[side] + new
                (found,) = ask(llm, [prompt], answer)
                answers[side][turn].append(found)
                histories[side] = prompt + list(found.tokens)
    return {
        side: [
            {
                "prompt_tokens": each[0].prompt,
                "ttft_ms": median_ms(each),
                "hit_rate": hit_rate(each),
                "same_tokens": same_share(each, expected),
            }
            for each, expected in zip(by_turn, answers["off"], strict=True)
        ]
        for side, by_turn in answers.items()
    }


def tables(result: dict[str, Any]) -> str:
    """All figures as Markdown."""
    rows = []
    for side, kinds in result["shared_prefix"].items():
        rows += [
            [side, kind, row["ttft_ms"], f"{row['hit_rate']:.1%}", f"{row['same_tokens']:.0%}"]
            for kind, row in kinds.items()
        ]
    first = markdown_table(["prefix caching", "requests", "TTFT (ms)", "hit rate", "same tokens as off"], rows)
    turns = [
        [
            turn + 1,
            on["prompt_tokens"],
            off["ttft_ms"],
            on["ttft_ms"],
            f"{off['ttft_ms'] / on['ttft_ms']:.1f}×",
            f"{on['hit_rate']:.1%}",
            f"{on['same_tokens']:.0%}",
        ]
        for turn, (on, off) in enumerate(zip(result["chat"]["on"], result["chat"]["off"], strict=True))
    ]
    names = ["turn", "prompt tokens", "TTFT off (ms)", "TTFT on (ms)", "faster", "hit rate", "same tokens as off"]
    found = (
        f"warm: TTFT {result['speed_up']:.1f}× better than cold, {result['speed_up_over_off']:.1f}× better than off"
    )
    return f"{first}\n{found} (target {TARGET:g}×)\n\n{markdown_table(names, turns)}"


def plot(out: Path | None, result: dict[str, Any]) -> None:
    plt = plotter(out)
    if plt is None or out is None:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for offset, side in ((-0.2, "off"), (0.2, "on")):
        kinds = result["shared_prefix"][side]
        heights = [row["ttft_ms"] for row in kinds.values()]
        left.bar([i + offset for i in range(len(kinds))], heights, 0.4, label=f"prefix caching {side}")
        left.set_xticks(range(len(kinds)), list(kinds))
        by_turn = result["chat"][side]
        right.plot(
            range(1, len(by_turn) + 1), [row["ttft_ms"] for row in by_turn], "o-", label=f"prefix caching {side}"
        )
    left.set_title("TTFT with a shared prefix (ms)")
    right.set_title("TTFT in a chat (ms)")
    right.set_xlabel("turn")
    right.set_ylim(bottom=0)
    left.legend()
    right.legend()
    save_plot(plt, figure, out / "prefix_cache.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--suffix", type=int, default=32)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--message", type=int, default=64)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = random_llama(getattr(torch, args.dtype), args.layers)
    longest = max(args.prefix + args.suffix + 4, args.turns * (args.message + args.answer))
    llms = {}
    for side in ("off", "on"):
        llms[side] = LLM(
            model,
            max_num_seqs=args.questions,
            max_model_len=longest,
            enable_prefix_caching=side == "on",
            pack_weights=True,
        )
        warm_up(llms[side])
        ask(llms[side], [[5] * (longest - 4)], 4)
    generator = torch.Generator().manual_seed(args.seed)
    start = time.perf_counter()
    shared = shared_prefix(llms, args.prefix, args.suffix, args.questions, args.repeats, generator)
    result: dict[str, Any] = {
        "dtype": args.dtype,
        **conditions(args.threads),
        "prefix_tokens": args.prefix,
        "shared_prefix": shared,
        "speed_up": shared["on"]["cold"]["ttft_ms"] / shared["on"]["warm"]["ttft_ms"],
        "speed_up_over_off": shared["off"]["warm"]["ttft_ms"] / shared["on"]["warm"]["ttft_ms"],
        "chat": chat(llms, args.turns, args.message, args.answer, args.repeats, generator),
        "stats": llms["on"].stats(),
    }
    text = tables(result)
    print(text)
    print(f"{time.perf_counter() - start:.0f} s")
    save(args.out, "prefix_cache", result, text)
    plot(args.out, result)


if __name__ == "__main__":
    main()
