"""What a model needs of a memory: weights counted exactly, caches of all layers, live tensors of a step."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from torch import fx, nn
from transformers import GPT2Config, GPT2LMHeadModel

from torch_pagoda.compiler.capture.aten import to_aten
from torch_pagoda.compiler.costs.live_memory import peak_live_bytes
from torch_pagoda.compiler.costs.requirements import Requirements, requirements
from torch_pagoda.compiler.costs.skeleton import build_skeleton
from torch_pagoda.compiler.costs.traffic import Step
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.passes import TracedGraph
from torch_pagoda.reports.memory_plan import plan_memory
from torch_pagoda.runtime.program import CacheSpec

from tiny_models import build_tiny_model
from toy_lm import VOCAB, ToyLM, captured, sdpa

ONLY_CAPTURE = CompileOptions(passes={"only": ["recognize_sdpa", "classify_masks", "insert_paged_cache"]})


@pytest.fixture(scope="module")
def gpt3() -> Requirements:
    """Of GPT-3 with 175 billion parameters (Brown et al., arXiv 2005.14165, table 2.1), in fp16."""
    config = GPT2Config(n_layer=96, n_embd=12288, n_head=96, vocab_size=50257, n_positions=2048, dtype=torch.float16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    needs = requirements(GPT2LMHeadModel, config)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB: less than a GiB was touched
    return needs


def test_gpt3_takes_350_gb_and_9_7_gb_for_one_sequence(gpt3: Requirements) -> None:
    """Decimal gigabytes both: 349.2 GB of fp16 weights, 9.66 GB (9.00 GiB) of keys and values of 2048 tokens."""
    needs = gpt3
    # Per layer 12 h^2 and 13 h (two norms, four biases of h, 3h, h, 4h, h); the head is tied to the embedding.
    hidden = 12288
    expected = 96 * (12 * hidden**2 + 13 * hidden) + (50257 + 2048) * hidden + 2 * hidden
    assert needs.parameters == expected == 174_604_259_328
    assert needs.weight_dtype == "float16" and needs.weight_bytes == 2 * expected
    assert round(needs.weight_bytes / 10**9, -1) == 350
    assert len(needs.caches) == 96 and needs.max_model_len == 2048
    found = plan_memory(
        needs.caches,
        memory=400 * 10**9,
        weight_bytes=needs.weight_bytes,
        activation_bytes=needs.activation_bytes(2048, 1),
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=2048,
    )
    whole = found.limits[-1]
    assert whole.tokens == 2048 and whole.sequence_bytes == 2 * 96 * 2048 * hidden * 2
    assert round(whole.sequence_bytes / 10**9, 1) == 9.7
    assert whole.paged == found.contiguous_sequences == 5


def test_a_few_layers_stand_for_all() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"] * 2
    model = build_tiny_model("gemma3_text", num_hidden_layers=8, layer_types=kinds)
    assert build_skeleton(type(model), model.config, torch.float32).depth < 8
    needs = requirements(type(model), model.config, torch.float32, ONLY_CAPTURE)
    assert needs.parameters == sum(p.numel() for p in model.parameters())
    tensors = (*model.parameters(), *model.buffers())
    assert needs.weight_bytes == sum(t.numel() * t.element_size() for t in tensors)
    config = model.config
    assert needs.caches == tuple(
        CacheSpec(
            config.num_key_value_heads,
            config.head_dim,
            config.head_dim,
            torch.float32,
            config.sliding_window if kind == "sliding_attention" else 0,
            group=int(kind != "sliding_attention"),
        )
        for kind in kinds
    )
    assert needs.max_model_len == config.max_position_embeddings


def test_layers_that_share_keys_are_not_cut_away() -> None:
    """In gemma3n the last layers read the caches of earlier ones; which, depends on how many layers there are."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        num_hidden_layers=10,
        num_kv_shared_layers=3,
        intermediate_size=64,
        hidden_size=64,
        vocab_size=256,
        vocab_size_per_layer_input=256,
        hidden_size_per_layer_input=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        activation_sparsity_pattern=None,
    )
    assert build_skeleton(Gemma3nForCausalLM, config, torch.float32).representatives == tuple(range(10))


class Watcher(fx.Interpreter):
    """Runs a graph and notes the most bytes of storages, those of its inputs aside, that were alive at once."""

    def run_watched(self, *inputs: Any) -> int:
        self.given = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor)}
        self.peak = 0
        with torch.no_grad():
            self.run(*inputs)
        return self.peak

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        held = torch.utils._pytree.tree_leaves((list(self.env.values()), result))
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in held if isinstance(t, torch.Tensor)}
        self.peak = max(self.peak, sum(s.nbytes() for at, s in storages.items() if at not in self.given))
        return result


def aten_without_cache(model: nn.Module) -> TracedGraph:
    found = captured(model)
    return to_aten(found.traced, found.context)


@pytest.mark.parametrize("tokens", [7, 100])
def test_live_bytes_are_those_of_a_run(tokens: int) -> None:
    traced = aten_without_cache(ToyLM(sdpa))
    ids = torch.randint(0, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(tokens)[None]
    given = {traced.input_ids: ids, traced.position_ids: positions, **traced.constants}
    traced.recompile()
    seen = Watcher(traced.module).run_watched(*[given.get(n.name, tokens) for n in traced.placeholders])
    inputs = ids.nbytes + positions.nbytes
    assert peak_live_bytes(traced, Step(tokens, tokens, tokens)) == seen + inputs


def test_live_bytes_grow_with_tokens_and_rows(gpt3: Requirements) -> None:
    small, large = gpt3.activation_bytes(1024, 4), gpt3.activation_bytes(2048, 4)
    assert 1.9 * small < large < 2.1 * small
    # As many rows of logits as there are tokens, at most.
    assert gpt3.activation_bytes(8, 64) == gpt3.activation_bytes(8, 8)
    # An MLP holds 4 h and its activation 4 h per token beside the residual stream, 2 bytes each.
    assert 2048 * 9 * 12288 * 2 <= gpt3.activation_bytes(2048, 1) <= 2048 * 20 * 12288 * 2


def test_scores_of_indexers_and_masks_of_what_they_choose_count() -> None:
    """Scores of 16 heads in float32, twice, up to a limit; nothing is scored where all keys are taken."""
    model = build_tiny_model("deepseek_v32", max_position_embeddings=1 << 17)
    needs = requirements(type(model), model.config, torch.float32)
    few, some, many = (needs.activation_bytes(64, 4, length) for length in (64, 4096, 1 << 16))
    heads, scores = 16, 1 << 24
    assert model.config.index_n_heads == heads and model.config.index_topk < 64
    assert few >= 8 * 64 * heads * 64
    assert 8 * 64 * heads * 4000 < some - few < 9 * 64 * heads * 4096
    assert 8 * scores < many < 9 * scores  # not 8 * 64 * heads * (1 << 16), four times as much
