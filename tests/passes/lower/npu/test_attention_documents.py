"""A sweep of attention calls: layout, queries, heads, mask, sparse_mode, window, precision, cache; of two releases.

What is legal stands here once more, a row for each sentence of the documents (``DOCUMENTS``). The limits, which
lowering emits by, and the reference kernels must agree with it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from torch_pagoda.passes.lower.npu.call import Call
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.npu.limits import attention, attention_sizes, violations

npu = torch.ops.npu
NO_LIMIT, BLOCK, CONTEXT = 2147483647, 128, 200
COMPRESSED = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
KEYS = torch.zeros(2, 1, 1, 2 * BLOCK, dtype=torch.bool)
WHOLE = torch.zeros(1, 1, 32, 2 * BLOCK, dtype=torch.bool)


class Case(NamedTuple):
    """A paged call of two sequences with ``CONTEXT`` keys.

    Attributes:
        layout: its ``input_layout``.
        queries: of each sequence.
        heads, kv_heads, dim: sizes.
        mask: "none", "compressed" ([2048, 2048]), "keys" ([B, 1, 1, keys]) or "whole" (one for all sequences).
        mode: ``sparse_mode``.
        window: keys that a query looks back over; 0 for no limit.
        precise: ``inner_precise``.
        cache: dims of the cache, 3 ([blocks, tokens, heads * dim]) or 4.
    """

    layout: str
    queries: int
    heads: int
    kv_heads: int
    dim: int
    mask: str
    mode: int
    window: int
    precise: int
    cache: int

    @property
    def is_packed(self) -> bool:
        return self.layout == "TND"

    @property
    def is_single(self) -> bool:
        return not self.is_packed and self.queries == 1

    @property
    def is_mha(self) -> bool:
        return self.heads == self.kv_heads


OP_PLUGIN = "op-plugin, npu_fused_infer_attention_score.md"
V2 = "op-plugin, npu_fused_infer_attention_score_v2.md"
V3 = "ops-transformer v9.0.0, aclnnFusedInferAttentionScoreV3.md"

DOCUMENTS: list[tuple[str, Callable[[Case, bool], bool]]] = [
    # Document and section; what it excludes of a case, from CANN 9.0 on or before.
    (f"{OP_PLUGIN}, sparse_mode: invalid for Q_S = 1 without rope", lambda c, _: c.is_single and c.mode > 1),
    (f"{OP_PLUGIN}, pre_tokens: invalid for Q_S = 1", lambda c, _: c.is_single and c.window > 0),
    (f"{OP_PLUGIN}, atten_mask: (2048, 2048) for 2, 3 and 4", lambda c, _: c.mode > 1 and c.mask != "compressed"),
    (f"{OP_PLUGIN}, sparse_mode 1: a whole mask", lambda c, _: c.mode == 1 and c.mask == "none"),
    (f"{OP_PLUGIN}, atten_mask: (.., Q_S, KV_S) for 0 and 1", lambda c, _: c.mode < 2 and c.mask == "compressed"),
    (
        f"{OP_PLUGIN}, atten_mask: as many rows as queries",
        lambda c, _: c.mode < 2 and c.mask == "keys" and c.queries > 1,
    ),
    (f"{V3}, TND: 0 without a mask, 3 and 4", lambda c, _: c.is_packed and (c.mode not in (0, 3, 4) or _whole(c))),
    (f"{V3}, TND, GQA: inner_precise 0; MHA in bfloat16: 0", lambda c, _: c.is_packed and c.precise > 0),
    (f"{OP_PLUGIN}, inner_precise: 0 and 1 for Q_S = 1", lambda c, _: c.is_single and c.precise > 1),
    (
        f"{V2}, TND: 64 (MHA), 128",
        lambda c, new: not new and c.is_packed and c.dim != 128 and (c.dim, c.is_mha) != (64, True),
    ),
    (f"{V3}, TND: equal, at most 256", lambda c, new: new and c.is_packed and c.dim > 256),
    (f"{OP_PLUGIN}, D: at most 512, a multiple of 16", lambda c, _: c.dim > 512 or c.dim % 16 > 0),
    (f"{OP_PLUGIN}, MLA: D of 512 with rope", lambda c, new: not new and c.dim == 512),
    (f"{V3}, TND: BnBsH", lambda c, _: c.is_packed and c.cache == 4),
    (f"{OP_PLUGIN}, paging: BSH takes BnBsH alone", lambda c, _: c.layout == "BSH" and c.cache == 4),
]


def _whole(case: Case) -> bool:
    return case.mode == 0 and case.mask != "none"


def cases() -> Iterator[Case]:
    """All combinations of a few values, but for those that no step has."""
    layouts = [("TND", 1), ("TND", 3), ("BSH", 1), ("BSH", 3), ("BNSD", 1), ("BNSD", 3)]
    heads = [(4, 2), (2, 2)]
    dims = [64, 80, 96, 120, 128, 256, 272, 512, 528]
    masks = ["none", "compressed", "keys", "whole"]
    for (layout, queries), (h, kv), dim in itertools.product(layouts, heads, dims):
        for mask, mode, window in itertools.product(masks, (0, 1, 2, 3, 4), (0, 7)):
            if not window or mode in (0, 4):
                yield Case(layout, queries, h, kv, dim, mask, mode, window, 0, 3)
        for precise, cache in ((1, 3), (2, 3), (0, 4)):
            yield Case(layout, queries, h, kv, dim, "compressed", 3, 0, precise, cache)
            yield Case(layout, queries, h, kv, dim, "none", 0, 0, precise, cache)


def arguments(case: Case, device: str) -> dict[str, Any]:
    """Of the operator."""
    tokens, width, dim = case.queries, 2 * BLOCK, case.dim
    query = {
        "TND": (2 * tokens, case.heads, dim),
        "BSH": (2, tokens, case.heads * dim),
        "BNSD": (2, case.heads, tokens, dim),
    }[case.layout]
    cache = (4, BLOCK, case.kv_heads * dim) if case.cache == 3 else (4, case.kv_heads, BLOCK, dim)
    mask = {"none": None, "compressed": COMPRESSED, "keys": KEYS, "whole": WHOLE}[case.mask]
    if case.is_single and case.mask == "whole":
        mask = WHOLE.expand(2, 1, 32, width).contiguous()  # the tiling asks for one for each sequence
    lens = [tokens, 2 * tokens] if case.is_packed else [tokens, tokens]
    return {
        "query": torch.zeros(query, dtype=torch.bfloat16, device=device),
        "key": torch.zeros(cache, dtype=torch.bfloat16, device=device),
        "value": torch.zeros(cache, dtype=torch.bfloat16, device=device),
        "atten_mask": mask,
        "block_table": torch.arange(4, dtype=torch.int32).view(2, 2).to(device),
        "block_size": BLOCK,
        "actual_seq_lengths": None if case.is_single else lens,
        "actual_seq_lengths_kv": [CONTEXT, CONTEXT],
        "num_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "input_layout": case.layout,
        "sparse_mode": case.mode,
        "pre_tokens": case.window - 1 if case.window else NO_LIMIT,
        "next_tokens": 0 if case.window and not case.is_single else NO_LIMIT,
        "inner_precise": case.precise,
    }


def disagreements(cann: str) -> list[str]:
    """Cases of which limits and documents say different things."""
    target, new = NpuTarget(graph_mode="aclgraph", cann=cann), float(cann) >= 9
    operator = npu.npu_fused_infer_attention_score.default
    found, used = [], Counter[str]()
    for case in cases():
        excluded = [section for section, excludes in DOCUMENTS if excludes(case, new)]
        used.update(excluded if len(excluded) == 1 else ())
        reasons = violations(Call.make(operator, target, **arguments(case, "meta")))
        if bool(excluded) != bool(reasons):
            found.append(f"{case}: {excluded or 'legal'}, but {reasons or 'accepted'}")
    relevant = [section for section, excludes in DOCUMENTS if any(excludes(case, new) for case in cases())]
    return found + [f"no case is excluded by it alone: {section}" for section in relevant if not used[section]]


@pytest.mark.parametrize("cann", ["8.3", "9.0"])
def test_limits_say_what_the_documents_say(cann: str) -> None:
    assert not disagreements(cann)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "single queries take any mode": lambda patch: _without(patch, "_one_query"),
    "packed layouts take any mode, precision and cache": lambda patch: _without(patch, "_packed"),
    "packed layouts take wider heads": lambda patch: patch.setattr(attention_sizes, "PACKED_DIM", 272),
    "every release takes wide heads": lambda patch: patch.setattr(attention_sizes, "WIDE_HEADS", (8, 0)),
}


def _without(patch: pytest.MonkeyPatch, rule: str) -> None:
    for limits in attention.LIMITS.values():
        patch.setattr(type(limits), "__setattr__", object.__setattr__, raising=False)
        rules = [each for each in limits.rules if each is not getattr(attention, rule)]
        patch.setattr(limits, "rules", rules)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_lax_limit_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    assert disagreements("8.3") or disagreements("9.0")


def test_reference_kernels_refuse_what_no_release_takes() -> None:
    kernel = npu.npu_fused_infer_attention_score
    for case in cases():
        if case.dim not in (64, 256, 272) or case.heads == case.kv_heads:
            continue
        # The first version's document has caches of four dims in TND; the kernel, other than limits, takes them.
        illegal = any(excludes(case, True) for section, excludes in DOCUMENTS if section != f"{V3}, TND: BnBsH")
        try:
            kernel(**arguments(case, "cpu"))
        except (ValueError, NotImplementedError):
            assert illegal, case
        else:
            assert not illegal, case
