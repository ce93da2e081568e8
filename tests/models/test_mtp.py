"""Models with heads of their own: the same tokens as without, and drafts that are those of transformers' module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import always, noted_drafts
from mtp_checkpoints import make_head, save_with_head
from stored_blocks import answers, generate, store_engine

from torch_pagoda.checkpoint.mtp_head import load_mtp_head
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.head_program import build_head
from torch_pagoda.runtime.batching import snapshots
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.speculation.mtp import MtpProgram

from tiny_models import build_tiny_model

MODELS = ("glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_text")
LENGTHS = (9, 40, 21)
PARAMS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"seed": 3, "top_p": 0.9, "logprobs": 2}}
SIZES: dict[str, dict[str, Any]] = {
    "chunks": {"num_blocks": 96, "max_num_batched_tokens": 16},
    "tight": {"num_blocks": 20, "max_num_batched_tokens": 16},
    "swapping": {"num_blocks": 20, "swap_space": 1 << 22, "preemption": "swap"},
}


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"quantization": "int8", "pack_weights": True},
    "bfloat16": {"batch_invariant": True, "pack_weights": True},
}


@cache
def programs(name: str, folder: Any, kind: str = "float32") -> tuple[Any, Any, Any]:
    """The model, its program and that of its head."""
    model = build_tiny_model(name)
    if kind == "bfloat16":
        model = model.bfloat16()
    folder = folder / kind / name
    save_with_head(model, make_head(model), folder)
    options = CompileOptions(codegen="none", taps_hidden=True, **KINDS[kind])
    program = build_program(model, options)
    head = load_mtp_head(folder, "auto", False)
    return model, program, build_head(head, program, head.shared, options)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(autouse=True)
def snapshots_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "WORTH", 8)


def run(engine: Engine, params: SamplingParams) -> tuple[list[Any], int]:
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 200, (length,), generator=generator).tolist() for length in LENGTHS]
    first = engine.generate(prompts, params)
    before = engine.stats()["cached_tokens"]
    turns = [[*o.prompt_token_ids, *o.outputs[0].token_ids, 7] for o in first]
    outputs = [*first, *(engine.generate([turn], params)[0] for turn in turns)]
    engine.batcher.check()
    cached = int(engine.stats()["cached_tokens"] - before)
    return [(o.outputs[0].token_ids, o.outputs[0].finish_reason, o.outputs[0].logprobs) for o in outputs], cached


def with_head(
    name: str,
    folder: Any,
    length: int | Callable[[], int] = 3,
    kind: str = "float32",
    make: Any = Engine,
    **options: Any,
) -> Engine:
    _, program, head = programs(name, folder, kind)
    engine: Engine = make(program, draft_program=head, speculative_config={"method": "mtp"}, **options)
    drafting = engine._core.state.drafting
    assert drafting is not None
    always(drafting, length)
    return engine


def expected_drafts(name: str, folder: Any, tokens: Sequence[int], count: int) -> list[int]:
    """Those of transformers' modules, without a cache."""
    model, _, _ = programs(name, folder)
    head = make_head(model)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        rows = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
        drafts: list[int] = []
        for _ in range(count):
            own = head.forward_layer(0, rows, torch.arange(ids.shape[1])[None], None, input_ids=ids)
            drafts.append(int(head._project_to_logits(own[:, -1]).argmax()))
            ids = torch.cat([ids, ids.new_tensor([drafts[-1:]])], 1)
            rows = torch.cat([rows, own[:, -1:]], 1)
    return drafts


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("sizes", SIZES)
def test_tokens_are_those_without_a_head(
    name: str, kind: str, sizes: str, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, **PARAMS[kind])
    options: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, **SIZES[sizes]}
    expected, cached = run(Engine(programs(name, folder)[1], **options), params)
    noted = noted_drafts(monkeypatch)
    engine = with_head(name, folder, **options)
    found, cached_with_drafts = run(engine, params)
    assert [own[:2] for own in found] == [own[:2] for own in expected]
    for (_, _, own), (_, _, other) in zip(found, expected, strict=True):
        for mine, theirs in zip(own or [], other or [], strict=True):
            assert {token: entry.logprob for token, entry in mine.items()} == {
                token: pytest.approx(entry.logprob, abs=1e-4) for token, entry in theirs.items()
            }
    stats = engine.stats()
    assert stats["spec_decode_num_draft_tokens"] > 0 and not stats["drafters_failed"]
    if sizes == "chunks":
        assert cached == cached_with_drafts
        some = sorted(noted)[:: max(1, len(noted) // 8)]
        assert [noted[tokens] for tokens in some] == [
            expected_drafts(name, folder, tokens, len(noted[tokens])) for tokens in some
        ]


@pytest.mark.parametrize("name", ["llama"])
def test_a_request_without_drafts_costs_the_head_nothing(
    name: str, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks have no keys of the head, which the next turn computes when it drafts."""
    lengths, heads = [0], []
    run_head = MtpProgram.run_head
    monkeypatch.setattr(MtpProgram, "run_head", lambda *step: heads.append(0) or run_head(*step))
    engine = with_head(name, folder, lambda: lengths[-1], block_size=4, num_blocks=96)
    heads.clear()  # whose cost was measured
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    (first,) = engine.generate([list(range(3, 24))], params)
    assert not heads
    noted = noted_drafts(monkeypatch)
    lengths.append(3)
    for _ in range(2):
        turn = [*first.prompt_token_ids, *first.outputs[0].token_ids, 7]
        (first,) = engine.generate([turn], params)
        assert first.num_cached_tokens > 30
    assert heads and len(noted) > 8
    for tokens, drafts in noted.items():
        assert drafts == expected_drafts(name, folder, tokens, len(drafts))


@pytest.mark.parametrize("options", [{}, {"swap_space": 1 << 22, "preemption": "swap"}], ids=["computed", "swapped"])
@pytest.mark.parametrize("name", ["llama"])
def test_preempted_requests_go_on_with_the_same_tokens(name: str, options: dict[str, Any], folder: Any) -> None:
    """All are admitted, and grow out of the cache."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    prompts = [list(range(3 + i, 12 + 2 * i)) for i in range(4)]
    options = {"block_size": 4, "max_num_seqs": 4, **options}
    expected = answers(Engine(programs(name, folder)[1], **options, num_blocks=96), prompts, 40)
    engine = with_head(name, folder, **options, num_blocks=20)
    outputs = engine.generate(prompts, params)
    engine.batcher.check()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    stats = engine.stats()
    assert stats["preemptions"] > 0 and (stats["swaps"] > 0) == ("preemption" in options)
    assert stats["spec_decode_num_draft_tokens"] > 0 and not stats["drafters_failed"]


@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_tokens_are_those_without_a_head_in_other_dtypes(name: str, kind: str, folder: Any) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=3, top_p=0.9)
    options: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, **SIZES["chunks"]}
    expected, _ = run(Engine(programs(name, folder, kind)[1], **options), params)
    engine = with_head(name, folder, kind=kind, **options)
    assert run(engine, params)[0] == expected
    assert engine.stats()["spec_decode_num_draft_tokens"] > 0 and not engine.stats()["drafters_failed"]


@pytest.mark.parametrize("name", ["llama"])
def test_blocks_of_a_store_come_with_the_heads_keys(
    name: str, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that takes them all has the tokens and the drafts of the one that stored them."""
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 200, (length,), generator=generator).tolist() for length in LENGTHS]
    expected = answers(Engine(programs(name, folder)[1], block_size=4, num_blocks=96), prompts, 12)
    noted = noted_drafts(monkeypatch)
    found = []
    for turn in range(2):
        engine = with_head(name, folder, make=partial(store_engine, folder=tmp_path), num_blocks=96)
        outputs = generate(engine, prompts, 12)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        cached = [(length - 1) // 4 * 4 if turn else 0 for length in LENGTHS]
        assert [output.num_cached_tokens for output in outputs] == cached
        assert not engine.stats()["drafters_failed"]
        found.append(dict(noted))
        noted.clear()
        engine.shutdown()
    assert found[0] == found[1] and any(found[0].values())
