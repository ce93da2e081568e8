"""``LLM.generate`` for ``serving.py``: a line with prompts in, a line with seconds, CPU seconds and tokens out."""

from __future__ import annotations

import json
import sys
import time

from torch_pagoda import LLM, SamplingParams


def main() -> None:
    model, *rest = sys.argv[1:]
    options = {
        name.removeprefix("--").replace("-", "_"): int(value)
        for name, value in zip(rest[::2], rest[1::2], strict=True)
    }
    llm = LLM(model, enable_prefix_caching=False, **options)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        params = SamplingParams(max_tokens=request["tokens"], temperature=0.0, ignore_eos=True)
        begin, used = time.perf_counter(), time.process_time()
        outputs = llm.generate(request["prompts"], params)
        result = {
            "seconds": time.perf_counter() - begin,
            "cpu": time.process_time() - used,
            "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
