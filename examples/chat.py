"""A conversation: every turn sends the whole history, and the prefix cache leaves only what is new to compute.

    python examples/chat.py [--model FOLDER_OR_HUB_ID] [--max-tokens 64] [--turns "What is a list?" "And a tuple?"]

Without --turns they are read from stdin, one per line, until it ends (Ctrl-D). A checkpoint without a chat template,
such as the shipped one, gets the turns as paragraphs of a text and writes the next one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from transformers import PreTrainedTokenizerBase

import torch_pagoda as pagoda

HERE = Path(__file__).resolve().parent


def questions(given: list[str] | None) -> Iterator[str]:
    """What the user says: the given turns, or lines of stdin."""
    if given is None and sys.stdin.isatty():
        with suppress(EOFError):
            while True:
                yield input("> ").strip()
        return
    for line in filter(None, map(str.strip, sys.stdin if given is None else given)):
        print(f"> {line}")
        yield line


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """The conversation as the model wants to see it, ending where the answer begins."""
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return tokenizer("".join(f"{message['content']}\n\n" for message in messages))["input_ids"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(HERE / "tiny-pydoc"), help="checkpoint folder or hub id")
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens per answer")
    parser.add_argument("--turns", nargs="+", help="what to say, instead of reading it from stdin")
    arguments = parser.parse_args()

    llm = pagoda.LLM(arguments.model)
    stop = None if llm.tokenizer.chat_template else "\n\n"
    params = pagoda.SamplingParams(max_tokens=arguments.max_tokens, temperature=0, stop=stop)
    messages: list[dict[str, str]] = []
    for question in filter(None, questions(arguments.turns)):
        messages.append({"role": "user", "content": question})
        tokens = prompt_tokens(llm.tokenizer, messages)
        while len(tokens) + arguments.max_tokens > llm.max_model_len and len(messages) > 1:
            # Half of the history at once: the cache does not know the text that is left, so it should happen rarely.
            del messages[: (len(messages) + 1) // 4 * 2]
            tokens = prompt_tokens(llm.tokenizer, messages)
            print("[the oldest turns are forgotten: the model's context is full]")

        before, begin, first = llm.stats(), time.perf_counter(), None
        answer = ""
        try:
            for piece in llm.stream(tokens, params):
                first = first or time.perf_counter() - begin
                answer += piece.text
                print(piece.text, end="", flush=True)
                if piece.error:
                    print(f"[failed: {piece.error}]", end="")
        except ValueError as error:  # a single turn that is longer than the context
            print(f"[refused: {error}]")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
        cached = llm.stats()["prefix_hit_tokens"] - before["prefix_hit_tokens"]
        print(
            f"\n[{cached} of {len(tokens)} prompt tokens from the cache, first token after {1000 * first:.0f} ms]\n"
        )

    stats = llm.stats()
    print(
        f"prefix cache: hit rate {stats['prefix_hit_rate']:.0%}, {stats['prefix_hit_tokens']} of "
        f"{stats['prefix_query_tokens']} prompt tokens; {stats['blocks_cached']} blocks kept"
    )


if __name__ == "__main__":
    main()
