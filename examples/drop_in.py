"""torch.compile(model, backend="pagoda"): the user's own forward calls and caches, rewritten underneath.

    python examples/drop_in.py [--model FOLDER_OR_HUB_ID]

Nothing of torch_pagoda is imported: torch finds the backend by its entry point.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(HERE / "tiny-pydoc"), help="checkpoint folder or hub id")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    inputs = tokenizer("Return a new list that", return_tensors="pt")

    with torch.inference_mode():
        # Any forward call, here one without a cache.
        expected = model(**inputs, use_cache=False).logits
        compiled = torch.compile(model, backend="pagoda")
        difference = (compiled(**inputs, use_cache=False).logits - expected).abs().max().item()
        print(f"forward: largest difference to eager {difference:.2e}")

        # The model's own generate, with transformers' own cache, on the compiled forward.
        expected_ids = model.generate(**inputs, max_new_tokens=32, do_sample=False)
        model.compile(backend="pagoda")
        ids = model.generate(**inputs, max_new_tokens=32, do_sample=False)
        print(tokenizer.decode(ids[0], skip_special_tokens=True))
        print(f"generate: same tokens as eager: {torch.equal(ids, expected_ids)}")


if __name__ == "__main__":
    main()
