"""The passes, and the list that defines their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .graph.record import PassRecord, Rejection
from .graph.traced import NotFinite, TracedGraph, UnsupportedModel
from .lower.cpu.batch_invariant import make_batch_invariant
from .lower.cpu.pack_linears import pack_linears
from .lower.cpu.quantize_experts import quantize_experts
from .lower.cpu.quantize_linears import quantize_linears
from .lower.cpu.stored_linears import stored_linears
from .lower.npu.activations import lower_npu_activations
from .lower.npu.attention.attention import lower_npu_attention
from .lower.npu.attention.indexers import lower_npu_indexers
from .lower.npu.attention.paged_attention import lower_npu_paged_attention
from .lower.npu.collectives import lower_npu_collectives
from .lower.npu.experts.fuse_experts import fuse_npu_experts
from .lower.npu.experts.moe import lower_npu_moe
from .lower.npu.experts.quantized_experts import quantize_npu_experts
from .lower.npu.latent.attention import absorb_latent_attention
from .lower.npu.linears import lower_npu_linears
from .lower.npu.mix_dtypes import mix_dtypes
from .lower.npu.norms import lower_npu_norms
from .lower.npu.quantized.fuse_quantization import fuse_npu_quantization
from .lower.npu.quantized.quantized_linears import quantize_npu_linears
from .lower.npu.rope import lower_npu_rope
from .lower.npu.sink_transposes import sink_transposes
from .lower.npu.spell_out_complex import spell_out_complex
from .lower.npu.spell_out_leftovers import spell_out_leftovers
from .lower.npu.split_products import split_products
from .lower.npu.states import lower_npu_states
from .recognize.activation import recognize_activation
from .recognize.classify_masks import classify_masks
from .recognize.eager_attention import recognize_eager_attention
from .recognize.gated_activation import recognize_gated_activation
from .recognize.gated_norm import recognize_gated_norm
from .recognize.indexed_attention import recognize_indexed_attention
from .recognize.layer_norm import recognize_layer_norm
from .recognize.linear import recognize_linear
from .recognize.moe import recognize_moe
from .recognize.moe_routing import recognize_moe_routing
from .recognize.relative_bias import recognize_relative_bias
from .recognize.rms_norm import recognize_rms_norm
from .recognize.rope import recognize_rope
from .recognize.sdpa import recognize_sdpa
from .recognize.short_conv import recognize_short_conv
from .recognize.token_shift import recognize_token_shift
from .rewrite.choose_rope_per_sequence import choose_rope_per_sequence
from .rewrite.feed_positions import feed_positions
from .rewrite.fold_constants import fold_constants
from .rewrite.fuse_residual_norm import fuse_residual_norm
from .rewrite.gather_logits import gather_logits
from .rewrite.group_rope import group_rope
from .rewrite.hoist_gather import hoist_gather
from .rewrite.insert_index_cache import insert_index_cache
from .rewrite.insert_paged_cache import insert_paged_cache
from .rewrite.insert_state import insert_state
from .rewrite.merge_linears import merge_linears
from .rewrite.remove_noops import remove_noops
from .rewrite.shard_layers import shard_layers
from .rewrite.shard_vocabulary import shard_vocabulary
from .rewrite.share_subexpressions import share_subexpressions
from .rewrite.slice_for_index import slice_for_index

__all__ = [
    "FIRST_OF_LOWERING",
    "PASSES",
    "SHARDING",
    "NotFinite",
    "Pass",
    "PassRecord",
    "Rejection",
    "TracedGraph",
    "UnsupportedModel",
]


@dataclass(frozen=True)
class Pass:
    """An entry of the pipeline.

    Attributes:
        name: what users write in ``passes={"skip": [name]}`` and reports show.
        apply: the pass; edits the graph in place.
        stage: the graph that it works on: "dynamo" for Dynamo's (torch functions and methods), "aten" for what
            AOTAutograd makes of it, "weights" for that one when it has been compared with the model.
        level: the lowest ``opt_level`` that runs it. 0: attention only. 1: bitwise the numbers of level 0 when the
            graph runs as it is. 2: the default, and all passes.
        required: a paged program cannot be made without it, so the self-check's fallback never drops it.
        option: the option that has to be given for it; "" for none.
        target: the only one that it is for, "cpu" or "npu"; "" for all.
        place: distinguishes entries with the same name; reports show it next to the name.
    """

    name: str
    apply: Callable[[TracedGraph], PassRecord]
    stage: str = "dynamo"
    level: int = 0
    required: bool = True
    option: str = ""
    target: str = ""
    place: str = ""


SHARDING = "shard_layers"
"""The graph in front of it is compared with the model; for several ranks, what follows from it is, too."""

FIRST_OF_LOWERING = "lower_npu_indexers"
"""User-defined passes run before it by default."""

PASSES: tuple[Pass, ...] = (
    # Recognition first: everything after it looks at pagoda::attention only.
    Pass("recognize_sdpa", recognize_sdpa),
    Pass("recognize_eager_attention", recognize_eager_attention),
    # These two take what depends on the tokens out of masks, so that the rest can be classified.
    Pass("recognize_indexed_attention", recognize_indexed_attention),
    Pass("recognize_relative_bias", recognize_relative_bias),
    # Needs attention nodes; must precede the cache, which takes no mask tensors.
    Pass("classify_masks", classify_masks),
    Pass("insert_paged_cache", insert_paged_cache),
    # Its keys lie in the blocks of a group of these.
    Pass("insert_index_cache", insert_index_cache),
    # They become operators that insert_state knows.
    Pass("recognize_short_conv", recognize_short_conv),
    Pass("recognize_token_shift", recognize_token_shift),
    # Its group comes behind those of the keys and values.
    Pass("insert_state", insert_state),
    # After the masks are gone: what is left of position arithmetic feeds embeddings and rotary tables.
    Pass("choose_rope_per_sequence", choose_rope_per_sequence),
    Pass("feed_positions", feed_positions),
    # After these: it gives the logits a row axis of their own, which the passes above need not know.
    Pass("gather_logits", gather_logits, required=False),
    # On the ATen graph. First what takes clutter away that would stand between the nodes of a pattern.
    Pass("remove_noops", remove_noops, "aten", level=1, required=False),
    Pass("slice_for_index", slice_for_index, "aten", level=1, required=False),
    Pass("recognize_linear", recognize_linear, "aten", required=False),
    Pass("share_subexpressions", share_subexpressions, "aten", level=1, required=False, place="model"),
    # Before norms and activations, which occur in its blocks too; routing needs the blocks.
    Pass("recognize_moe", recognize_moe, "aten", level=2, required=False),
    Pass("recognize_moe_routing", recognize_moe_routing, "aten", level=2, required=False),
    Pass("recognize_rms_norm", recognize_rms_norm, "aten", level=2, required=False),
    Pass("recognize_layer_norm", recognize_layer_norm, "aten", level=2, required=False),
    Pass("recognize_activation", recognize_activation, "aten", level=2, required=False),
    # Needs the norms and the activations, and takes gates that would be gated activations in float32.
    Pass("recognize_gated_norm", recognize_gated_norm, "aten", level=2, required=False, target="cpu"),
    # Needs the activations.
    Pass("recognize_gated_activation", recognize_gated_activation, "aten", level=2, required=False),
    Pass("recognize_rope", recognize_rope, "aten", level=2, required=False),
    # Once more for the tables that the rotations brought.
    Pass("share_subexpressions", share_subexpressions, "aten", level=1, required=False, place="rotations"),
    # After the recognition of norms, whose 1 + weight stays the weight; what is left is computed when compiling.
    Pass("fold_constants", fold_constants, "aten", level=1, required=False, place="model"),
    # Needs the norms.
    Pass("fuse_residual_norm", fuse_residual_norm, "aten", level=2, required=False),
    # Needs the single rotations.
    Pass("group_rope", group_rope, "aten", level=2, required=False),
    # Needs all that was recognized, and the linears one by one.
    Pass(SHARDING, shard_layers, "aten", option="tensor_parallel_size"),
    # What the layers have left: large tables.
    Pass("shard_vocabulary", shard_vocabulary, "aten", option="tensor_parallel_size"),
    # After the recognition of rotations and gates, which read the single products.
    Pass("merge_linears", merge_linears, "aten", level=2, required=False),
    # Needs all that was recognized: it knows which operators work on each token by itself.
    Pass("hoist_gather", hoist_gather, "aten", level=2, required=False),
    # Lowering, last: the passes above look for canonical operators and plain linears.
    # Before what attends the keys that are chosen.
    Pass("lower_npu_indexers", lower_npu_indexers, "aten", target="npu"),
    # Reads the canonical norms and rotations of the latent; what it leaves alone is lowered like any other attention.
    Pass("absorb_latent_attention", absorb_latent_attention, "aten", level=2, required=False, target="npu"),
    # First: what lowers rotations and attention looks for transposes right in front of them.
    Pass("sink_transposes", sink_transposes, "aten", required=False, target="npu"),
    Pass("lower_npu_moe", lower_npu_moe, "aten", target="npu"),
    Pass("lower_npu_collectives", lower_npu_collectives, "aten", target="npu"),
    Pass("lower_npu_norms", lower_npu_norms, "aten", target="npu"),
    # Reads gate and up as halves of one product, which the splits below would hide.
    Pass("lower_npu_activations", lower_npu_activations, "aten", target="npu"),
    Pass("lower_npu_rope", lower_npu_rope, "aten", target="npu"),
    Pass("lower_npu_paged_attention", lower_npu_paged_attention, "aten", target="npu"),
    Pass("lower_npu_attention", lower_npu_attention, "aten", target="npu"),
    Pass("lower_npu_states", lower_npu_states, "aten", target="npu"),
    Pass("lower_npu_linears", lower_npu_linears, "aten", target="npu"),
    Pass("split_products", split_products, "aten", target="npu"),
    Pass("spell_out_complex", spell_out_complex, "aten", required=False, target="npu"),
    Pass("spell_out_leftovers", spell_out_leftovers, "aten", target="npu"),
    # After the others: it also reads sums that they make.
    Pass("mix_dtypes", mix_dtypes, "aten", level=1, required=False, target="npu"),
    # Once more: taps of convolutions as their sums take them.
    Pass("fold_constants", fold_constants, "aten", level=1, required=False, target="npu", place="lowering"),
    # Once more: every layer has made its own layout of the rotary tables.
    Pass(
        "share_subexpressions", share_subexpressions, "aten", level=1, required=False, target="npu", place="lowering"
    ),
    # How weights are held, once the graph over plain ones has been compared. First what takes fewer bits.
    Pass("stored_linears", stored_linears, "weights", required=False, target="cpu"),
    Pass("quantize_experts", quantize_experts, "weights", required=False, target="cpu"),
    Pass("quantize_linears", quantize_linears, "weights", required=False, option="quantization", target="cpu"),
    # Likewise for an NPU, on its lowered graph.
    Pass("quantize_npu_experts", quantize_npu_experts, "weights", required=False, target="npu"),
    Pass("quantize_npu_linears", quantize_npu_linears, "weights", required=False, target="npu"),
    # Needs the roundings.
    Pass("fuse_npu_quantization", fuse_npu_quantization, "weights", level=2, required=False, target="npu"),
    # Needs the activations that round.
    Pass("fuse_npu_experts", fuse_npu_experts, "weights", level=2, required=False, target="npu"),
    # Rounded products are invariant already; packed ones would not be.
    Pass("make_batch_invariant", make_batch_invariant, "weights", option="batch_invariant", target="cpu"),
    Pass("pack_linears", pack_linears, "weights", required=False, option="pack_weights", target="cpu"),
)
