"""Summaries of a batch of files of any length.

    python examples/summarize.py [FILE ...] [--model FOLDER_OR_HUB_ID] [--max-tokens 48]

All texts run in one continuous batch. A prompt of more than --max-num-batched-tokens is prefilled in chunks, one per
step, so that the others get on meanwhile. A text that is longer than the model's context is split at line ends, and
the summaries of its parts are summarized together. Exit status 1 if a file could not be summarized.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_left
from pathlib import Path

from transformers import PreTrainedTokenizerBase

import torch_pagoda as pagoda

HERE = Path(__file__).resolve().parent
FILES = [HERE / "tiny-pydoc" / "README.md", HERE.parent / "LICENSE"]


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The request for a summary, as a chat where the model knows chats, else as a text to continue."""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": f"Summarize the following text in a few sentences.\n\n{text}"}]
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    return tokenizer(f"{text}\n\nIn short,", verbose=False)["input_ids"]


def split(tokenizer: PreTrainedTokenizerBase, text: str, room: int) -> list[str]:
    """The text in parts of at most `room` tokens, cut at line ends where there are any."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = [begin for begin, _ in encoded["offset_mapping"]]
    parts, first = [], 0
    while len(starts) - first > room:
        end = starts[first + room]
        end = text.rfind("\n", starts[first], end) + 1 or end
        parts.append(text[starts[first] : end])
        first = bisect_left(starts, end)
    return [*parts, text[starts[first] :]]


def read_texts(paths: list[Path]) -> dict[Path, str]:
    """The files' texts; one that cannot be read is named and left out."""
    texts = {}
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            print(f"{path} is left out: {error}", file=sys.stderr)
            continue
        if text:
            texts[path] = text
        else:
            print(f"{path} is left out: it is empty", file=sys.stderr)
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=FILES, help="UTF-8 text")
    parser.add_argument("--model", default=str(HERE / "tiny-pydoc"), help="checkpoint folder or hub id")
    parser.add_argument("--max-tokens", type=int, default=48, help="of a summary")
    parser.add_argument("--max-num-batched-tokens", type=int, default=256, help="tokens per step")
    arguments = parser.parse_args()

    llm = pagoda.LLM(arguments.model, max_num_batched_tokens=arguments.max_num_batched_tokens)
    params = pagoda.SamplingParams(max_tokens=arguments.max_tokens, temperature=0)
    room = llm.max_model_len - arguments.max_tokens - len(prompt_tokens(llm.tokenizer, ""))
    if room < 4 * arguments.max_tokens:  # else the summaries of the parts would hardly be shorter than the parts
        parser.error(f"--max-tokens {arguments.max_tokens} leaves {room} tokens of the context for text; lower it")

    texts = read_texts(arguments.files)
    failed = len(texts) < len(arguments.files)
    while texts:
        parts = {path: split(llm.tokenizer, text, room) for path, text in texts.items()}
        prompts = [prompt_tokens(llm.tokenizer, part) for own in parts.values() for part in own]
        outputs = iter(llm.generate(prompts, params))
        texts = {}
        for path, own in parts.items():
            found = [next(outputs) for _ in own]
            errors = [output.outputs[0].error for output in found if output.outputs[0].error]
            summaries = [output.outputs[0].text.strip() for output in found]
            lengths = [len(output.prompt_token_ids) for output in found]
            chunks = sum(-(-length // arguments.max_num_batched_tokens) for length in lengths)
            print(f"--- {path.name}: {sum(lengths)} tokens; parts: {len(own)}; prefill chunks: {chunks} or more")
            if errors:
                print(f"failed: {errors[0]}\n")
                failed = True
            elif len(own) > 1:
                print("too long for the context: the summaries of its parts are summarized next\n")
                texts[path] = "\n".join(summaries)
            else:
                print(f"{summaries[0]}\n")

    profile = llm.profile()
    mixed = profile.totals["mixed"].num_steps if "mixed" in profile.totals else 0
    print(
        f"{profile.num_prefill_tokens} prompt tokens and {profile.num_generated_tokens} new ones in "
        f"{profile.num_steps} steps of at most {arguments.max_num_batched_tokens} tokens; "
        f"{mixed} steps did both, a chunk of one text and new tokens of others"
    )
    if profile.itl is not None:
        print(f"a text waited at most {1000 * profile.itl.max:.0f} ms for its next token")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
