"""The process that ``pagoda bench startup`` times: reads options from stdin, writes the figures as one line."""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Start a model and generate a token."""
    start = time.perf_counter()
    given = json.load(sys.stdin)
    import torch_pagoda as pagoda

    llm = pagoda.LLM(given["model"], given["tokenizer"], **given["options"])
    llm.generate([[1, 2, 3]], pagoda.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "stored": llm.compile_report.stored, "phases": llm.compile_report.seconds}))


if __name__ == "__main__":
    main()
