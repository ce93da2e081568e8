"""Warm-up at the sizes that models have: a window of 4096, 151,936 tokens, 64 sequences and chunks of 2048."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowered_models import assert_same, lowered

from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import AclGraphs
from torch_pagoda.compiler.targets.npu.ge.ge_route import GeGraphs
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

LIMITS = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 6000, "num_blocks": 128}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["aclgraph", "ge"])
def test_real_sizes(monkeypatch, mode):
    sizes: dict[str, Any] = {"vocab_size": 151936, "window": 4096, "max_position_embeddings": 8192}
    traced = lowered("mistral", mode, block_size=128, **sizes)[1]
    steps: list[int] = []

    def graph(*args: Any) -> Any:
        steps.append(args[[n.name for n in traced.placeholders].index(traced.input_ids)].shape[1])
        return traced.module(*args)

    monkeypatch.setattr(AclGraphs, "_compile", lambda self, scheduled: graph)
    monkeypatch.setattr(GeGraphs, "_compile", lambda self, length: graph)
    route = AclGraphs(traced, traced.module, 8) if mode == "aclgraph" else GeGraphs(traced)
    engine = Engine(link(traced, route), block_size=128, **LIMITS)
    report = engine.runner.program.report
    assert not any(size.reason for size in report.sizes), report.sizes
    if mode == "aclgraph":
        assert steps[0] == 64 and max(steps) == 2048 and len(route.captured) == 8
    else:
        assert set(route.graphs) == set(range(8, 65, 8))
    prompts = [
        torch.randint(3, 150_000, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5000, 9)
    ]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
    found = engine.generate(prompts, params)
    expected = Engine(link(traced, traced.module), block_size=128, **LIMITS).generate(prompts, params)
    assert_same(found, expected)
    assert not route.eager_steps
