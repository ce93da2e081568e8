"""pagoda.compile(model): model.generate as it was, on the paged and batched engine.

python examples/generate_batch.py [--model FOLDER_OR_HUB_ID]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_pagoda as pagoda

HERE = Path(__file__).resolve().parent
PROMPTS = ["Return the", "Raise a ValueError if the given", "A context manager that"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(HERE / "tiny-pydoc"), help="checkpoint folder or hub id")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()

    model = pagoda.compile(model)
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    ids = model.generate(**inputs, max_new_tokens=32, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    for text in tokenizer.batch_decode(ids, skip_special_tokens=True):
        print(text, end="\n\n")


if __name__ == "__main__":
    main()
