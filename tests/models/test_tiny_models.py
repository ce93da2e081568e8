"""The builder of tiny models: it reaches every architecture, and what it builds can tell right from wrong."""

from __future__ import annotations

import pytest
import torch

from hf_reference import greedy_with_cache, greedy_without_cache, logits_of
from tiny_models import LLAMA_VARIANTS, WINDOW, build_tiny_model, causal_lm_types, tiny_config

NO_CONFIG = {"gemma4_assistant"}
"""Its own validation asks for more KV-sharing layers than its cache layout allows (transformers 5.23)."""


def test_every_architecture_has_a_tiny_config() -> None:
    failed = set()
    for model_type in causal_lm_types():
        try:
            config = tiny_config(model_type)
        except Exception:
            failed.add(model_type)
            continue
        config = getattr(config, "text_config", config)
        assert getattr(config, "vocab_size", 0) <= 320, model_type
        assert getattr(config, "hidden_size", 0) <= 64, model_type
    assert failed <= NO_CONFIG


@pytest.mark.parametrize("model_type", ("llama", "gemma2", "mixtral", "deepseek_v3", "bloom", "roberta"))
def test_built_models_depend_on_all_their_input(model_type: str) -> None:
    model = build_tiny_model(model_type)
    ids = torch.randint(3, 250, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    logits = logits_of(model, ids)
    assert 0.3 < float(logits.std()) < 10
    changed = logits_of(model, [(ids[0] + 5) % 200 + 3, *ids[1:]])
    torch.testing.assert_close(logits_of(model, ids[:-1]), logits[:-1])  # causal
    assert float((changed - logits)[-1].abs().max()) > 0.01  # and the first token reaches the last


def test_the_window_is_crossed() -> None:
    ids = torch.randint(3, 250, (3 * WINDOW,), generator=torch.Generator().manual_seed(0)).tolist()
    with_window = logits_of(build_tiny_model("mistral"), ids)
    without = logits_of(build_tiny_model("mistral", sliding_window=None), ids)
    torch.testing.assert_close(with_window[:WINDOW], without[:WINDOW])
    assert float((with_window - without)[WINDOW + 1 :].abs().max()) > 0.01


def test_seeds_and_random_state() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again = build_tiny_model("llama", seed=1), build_tiny_model("llama", seed=1)
    other = build_tiny_model("llama", seed=2)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    half = build_tiny_model("llama", seed=1, dtype=torch.bfloat16)
    torch.testing.assert_close(half.lm_head.weight.float(), first.lm_head.weight, rtol=1e-2, atol=1e-2)


def test_tied_and_untied() -> None:
    tied = build_tiny_model("llama", tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    untied = build_tiny_model("llama")
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_longrope_variant_changes_its_table_on_the_way() -> None:
    """With a cache, keys of before the switch keep the short table: other numbers than without a cache."""
    variant = LLAMA_VARIANTS["llama/rope-longrope"]
    prompt = list(range(3, 13))
    cached = greedy_with_cache(build_tiny_model(variant.model_type, **variant.overrides), prompt, 12)
    alone = greedy_without_cache(build_tiny_model(variant.model_type, **variant.overrides), prompt, 12)
    difference = (cached.logprobs - alone.logprobs).abs().amax(-1)
    assert float(difference[:6].max()) < 1e-4
    assert float(difference[7:].max()) > 1e-2


def test_unknown_architecture() -> None:
    with pytest.raises(ValueError, match="model_type='lama'"):
        tiny_config("lama")
