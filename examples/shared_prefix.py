"""Many questions to one document: with prefix caching it is computed once, and each answer begins much earlier.

    python examples/shared_prefix.py [--model FOLDER_OR_HUB_ID] [--document FILE] [--questions "..." "..."]

Every question is asked twice, first with nothing shared, then with the document's keys and values in the cache.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

from transformers import PreTrainedTokenizerBase

import torch_pagoda as pagoda

HERE = Path(__file__).resolve().parent
QUESTIONS = [
    "What is it?",
    "Who made it?",
    "How large is it?",
    "Which text has it read?",
    "How was it trained?",
    "What does it not know?",
    "Which license does it have?",
    "How well does it do on text that it has not read?",
]


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, document: str, question: str) -> list[int]:
    """The question behind the document: whatever differs has to come last, for only beginnings are shared."""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": f"{document}\n\n{question}"}]
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    return tokenizer(f"{document}\n\n{question}\n\n", verbose=False)["input_ids"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(HERE / "tiny-pydoc"), help="checkpoint folder or hub id")
    parser.add_argument("--document", type=Path, default=HERE / "tiny-pydoc" / "README.md", help="UTF-8 text")
    parser.add_argument("--questions", nargs="+", default=QUESTIONS, help="two at least")
    parser.add_argument("--max-tokens", type=int, default=16, help="new tokens per answer")
    arguments = parser.parse_args()
    if len(arguments.questions) < 2:
        parser.error("--questions holds a single one, which has nobody to share with; give two at least")

    llm = pagoda.LLM(arguments.model)
    params = pagoda.SamplingParams(max_tokens=arguments.max_tokens, temperature=0)
    document = arguments.document.read_text(encoding="utf-8").strip()
    prompts = [prompt_tokens(llm.tokenizer, document, question) for question in arguments.questions]

    # Prompts share only with those of the same salt. One of its own for each is what LLM(enable_prefix_caching=False)
    # does, without loading the model a second time.
    own = [f"question {number}" for number in range(len(prompts))]
    means = []
    for name, salts in (("without sharing", own), ("with prefix caching", [""] * len(prompts))):
        # One after the other, as a reader asks; a list of prompts in one call shares in the same way.
        outputs = [
            llm.generate(prompt, params, cache_salt=salt)[0] for prompt, salt in zip(prompts, salts, strict=True)
        ]
        total = sum(len(output.prompt_token_ids) for output in outputs)
        saved = sum(output.num_cached_tokens for output in outputs)
        means.append(mean(output.metrics.ttft for output in outputs[1:]))  # the first has to compute it all
        print(f"{name}: {total - saved} of {total} prompt tokens computed, {saved} saved;", end=" ")
        print(f"first token of questions 2 to {len(outputs)} after {1000 * means[-1]:.1f} ms on average")
    print(f"the first token comes {means[0] / means[1]:.1f} times as early\n")

    for question, output in zip(arguments.questions, outputs, strict=True):
        print(f"{question}\n  {' '.join(output.outputs[0].text.split())}")


if __name__ == "__main__":
    main()
