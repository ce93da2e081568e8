"""The ACL graph route: the calls of a lowered graph are captured at planned sizes and replayed.

npugraph_ex compiles the graph, once and with symbols for its sizes; for each new size it captures the calls, and from
then on replays them on the same addresses. So

- caches and weights are used where they lie; caches are bound once, at another address everything is captured anew;
- what changes from step to step is copied into buffers of a fixed address, one per input and size;
- the lists of lengths are the exception: npugraph_ex gives the attention calls (``npu_fused_infer_attention_score``
  v1 and v2, no other operator) the values of each replay;
- these lists have one length, that of the most sequences and one more, to which dummy tokens can belong. Their dummy
  members beyond the dummy tokens stand for sequences without tokens. Tensors of lengths, which other operators take,
  have as many.

Where a schedule gives branches of decode steps, or fetches of weights, to streams of their own, npugraph_ex compiles
the graph a second time, with these, and steps of few tokens are captured from there; all others from the graph
without. Steps of prompts are large and keep the cubes busy.

npugraph_ex captures at most ``capture_limit`` sizes and throws all of them away at the next one, running eagerly from
then on. That must not happen unnoticed: a step that fits no planned size runs eagerly by our decision, and is logged.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, tracing

from .....passes import TracedGraph
from .....passes.graph.fx_nodes import step_field
from .....runtime.cache.cache_specs import has_state
from .....runtime.device_queue import sent
from .....runtime.npu_errors.device_lost import raise_if_lost
from .....runtime.program import KVCache
from .....runtime.state_tables import CHUNK_TABLES
from ....report import first_line
from ..flat_graph import LENGTHS_ON_DEVICE, flat_graph, readers
from ..in_place import write_in_place
from ..route import PlannedSize, Route, Run, ctrl_c_kept
from ..schedules.prefetches import counted_fetches
from ..schedules.schedule_options import leave_out
from ..schedules.side_branches import MOST_TOKENS, counted_branches
from ..sizes.capture_sizes import most_padding, padded_size, plan_capture_sizes, request_mix
from ..sizes.graph_resources import GraphNeeds, capture_budget
from ..sizes.step_padding import StepSize, spare_blocks
from ..warm_up.steps import StepShape, fitting_shape
from .agreed_captures import agree_on_captures
from .capture_updates import keep_updates_apart
from .prefetch_stream import use_prefetch_stream
from .side_stream import EVENTS_PER_BRANCH, new_label, use_side_stream

log = logging.getLogger(__name__)
# Inputs whose sizes depend on how a step's tokens are dealt out.
_PADDED = frozenset({"padded_tokens", *CHUNK_TABLES})

MIXED_SEQUENCES = 4
"""Sequences beyond those that the tokens need in a step of prefill and decode that a capture is compared on."""


class AclGraphs(Route):
    """Runs a lowered graph by captured ACL graphs, each captured when it is first needed.

    Args:
        traced: a graph lowered for ``graph_mode="aclgraph"``; its constants are linked. Its nodes may have the notes
            of schedules (``passes.schedule``).
        eager: runs the graph's calls one by one, for steps that are not captured.
        budget: most sizes that are captured; by default what ``capture_budget`` says.
        options: of npugraph_ex, see ``toolchain_options``.

    Attributes:
        planned: numbers of tokens that steps are padded to, ascending.
        drafted: the same of steps that verify drafts, in which the logits of all tokens are requested: the multiples
            of 1 + drafts that are above the sequences of a step.
        needs: what each captured size occupies of the device.
        refusal: why no size is captured; "" where some are.
        captured: sizes that have been captured, as (tokens, asked rows).
        dropped: numbers of tokens → why they are not captured, or what was is not used.
    """

    name = "aclgraph"

    def __init__(
        self,
        traced: TracedGraph,
        eager: Run,
        budget: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(traced, eager)
        self._options = dict(options or {})
        assert traced.npu is not None
        branches, fetches = counted_branches(traced.graph), counted_fetches(traced.graph)
        streams, events = (branches > 0) + (fetches > 0), EVENTS_PER_BRANCH * branches + fetches
        self.needs = GraphNeeds(_attention_calls(traced), streams, events, groups=int(traced.ranks > 1))
        self._branches, self._fetches, self._label = branches > 0, fetches > 0, new_label()
        self._most, self._limit = capture_budget(traced.npu.soc, self.needs)
        if budget is not None:
            self._most, self._limit = budget, f"{budget} are requested"
        self._budget = self._most
        names = [node.name for node in traced.placeholders]
        self._ids_at = names.index(traced.input_ids)
        self._lens_at = names.index("seq_lens") if "seq_lens" in names else None
        self._rows_at = names.index("logits_rows") if "logits_rows" in names else None
        self._only_decode = any(step_field(node) in _PADDED and node.users for node in traced.placeholders)
        self.refusal = _why_not_captured(traced, self.lists)
        self._length = self._width = 0
        self._caches: list[torch.Tensor] = []
        self._graphs: dict[bool, Run] = {}  # with streams of a schedule, or without
        self._static: dict[tuple[int, torch.Size], torch.Tensor] = {}
        self.planned: tuple[int, ...] = ()
        self.drafted: tuple[int, ...] = ()
        self.captured: set[tuple[int, int]] = set()
        self.dropped: dict[int, str] = {}
        self._failure = ""

    @property
    def failure(self) -> str:
        return "" if self.captured else self._failure

    def plan(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> int:
        self.dropped.clear()
        self._limits.clear()
        self._budget, self._failure = self._most, ""
        if self._budget < 1:
            self.refusal = self.refusal or f"no size can be captured: {self._limit}"
        if self.refusal:
            self._limits.append(self.refusal)
            for name, counted in (("streams", self._branches), ("prefetch", self._fetches)):
                if counted:
                    leave_out(name, f"nothing is captured: {self.refusal}", self.dropped_schedules)
            return 0
        most = max_num_seqs if self._only_decode else max(max_num_seqs, max_num_batched_tokens)
        mix = request_mix(max_num_seqs, most)
        self.drafted = self._drafted_sizes(max_num_seqs, max_num_batched_tokens, max_model_len)
        self.planned = plan_capture_sizes(mix, most, self._budget - len(self.drafted))
        if len(self.planned) < len(mix):
            self._limits.append(f"{len(self.planned)} sizes of {len(mix)} steps are planned: {self._limit}")
        self._length = max_num_seqs + 1
        gaps = (upper - lower for lower, upper in itertools.pairwise((self._length, *self.drafted)))
        padding = max((most_padding(self.planned), *gaps))
        self._width = max(spare_blocks(max_model_len, self.block_size), spare_blocks(padding, self.block_size))
        for limit in self.limits:
            log.info("%s", limit)
        log.info("planned ACL graphs for %s tokens", ", ".join(map(str, self.planned)))
        if self.drafted:
            log.info("and, with drafts, for %s tokens", ", ".join(map(str, self.drafted)))
        return padding

    def _drafted_sizes(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> tuple[int, ...]:
        """A quarter of the captures at most, for steps of any number of sequences with drafts."""
        each = 1 + self._num_drafts
        tokens = range(each, min(max_num_seqs * each, max_num_batched_tokens) + 1, each)
        # Of fewer tokens than the lists have members, all logits are requested anyway.
        mix = {n: 1.0 for n in tokens if n > max_num_seqs + 1}
        if not 1 < each <= max_model_len or self._only_decode or not mix or self._budget < 4:
            return ()
        return plan_capture_sizes(mix, max(mix), self._budget // 4)

    def planned_sizes(self) -> list[PlannedSize]:
        """Decode steps first, each kind from its largest on: steps of a size that fits no more have one above it."""
        below = dict(zip(self.planned, (0, *self.planned), strict=False))
        sizes = [n for n in reversed(self.planned) if n not in self.dropped]
        sizes.sort(key=lambda tokens: tokens > self._max_num_seqs)  # stable
        longest, found = self._max_model_len, []
        for tokens in sizes:
            # With a dummy token where another size does not take the step.
            real = tokens - (tokens - below[tokens] > 1)
            decodes = tokens <= self._max_num_seqs
            sequences = real if decodes else min(self._max_num_seqs, -(-real // longest) + MIXED_SEQUENCES)
            shape = fitting_shape(real, sequences, longest)
            if shape.tokens <= below[tokens]:
                continue  # no step is so large: sequences are too short
            name = f"{'decode' if decodes else 'mixed'} steps of {tokens} tokens"
            # The second one is a replay, with other lengths than what was captured.
            drop = partial(self._drop, tokens)
            found.append(PlannedSize(name, (shape, shape), lambda: None, self._run_captured, drop))
        return found + self._drafted_plans()

    def _drafted_plans(self) -> list[PlannedSize]:
        """Those of steps with drafts, with a dummy sequence where another size does not take the step."""
        each, found = 1 + self._num_drafts, []
        for lower, tokens in reversed([*itertools.pairwise((self._length, *self.drafted))]):
            sequences = tokens // each - (tokens - lower > each)
            shape = StepShape(sequences * each, sequences, self._num_drafts)
            drop = partial(self._drop_drafted, tokens)
            name = f"verification steps of {tokens} tokens"
            found.append(PlannedSize(name, (shape, shape), lambda: None, self._run_captured, drop))
        return found

    def _drop(self, tokens: int, reason: str) -> None:
        self.dropped[tokens] = reason
        self.captured = {size for size in self.captured if size != (tokens, min(tokens, self._length))}

    def _drop_drafted(self, tokens: int, reason: str) -> None:
        self.drafted = tuple(n for n in self.drafted if n != tokens)
        self.captured.discard((tokens, tokens))

    def bind(self, kv_cache: KVCache) -> None:
        """Take notice of the caches that later calls receive; what was captured is thrown away."""
        super().bind(kv_cache)
        self._caches = [cache for pair in kv_cache for cache in pair]
        self._graphs.clear()
        self._static.clear()
        self.captured.clear()

    def size_for(self, size: StepSize) -> StepSize | None:
        """The next planned number of tokens, with as many sequences as the lists have members."""
        drafted = padded_size(size.tokens, self.drafted) if size.rows > self._length else None
        if drafted and drafted - size.tokens <= self.most_dummies and size.blocks <= self._width:
            return StepSize(drafted, self._length, drafted, self._width)
        tokens = padded_size(size.tokens, [n for n in self.planned if n not in self.dropped])
        reason = self.refusal
        if not reason and self._only_decode and size.tokens != size.sequences:
            reason = "sequences differ in length, but the graph pads them to the longest"
        if not reason and (tokens is None or size.sequences >= self._length or size.blocks > self._width):
            reason = f"steps are larger than planned, {max(self.planned)} tokens of {self._length - 1} sequences"
            if (planned := padded_size(size.tokens, self.planned)) in self.dropped:
                reason = f"the size of {planned} tokens was dropped: {self.dropped[planned]}"
        elif not reason and tokens is not None and tokens - size.tokens > self.most_dummies:
            planned = padded_size(size.tokens, self.planned)
            reason = f"the size of {planned} tokens was dropped, and the next one has {tokens}"
        if reason or tokens is None:
            self.note_eager(reason)
            return None
        rows = min(tokens, self._length)
        return StepSize(tokens, self._length, rows if size.rows <= rows else tokens, self._width)

    def __call__(self, *args: Any) -> Sequence[Any]:
        size = self._planned_size(args)
        if size is None:
            return self.run_by_operator(args)
        if size not in self.captured and (self.is_warm or len(self.captured) >= self._budget):
            self.note_eager(
                f"steps of {size[0]} tokens with {size[1]} output rows are not captured"
                if self.is_warm
                else self._failure or f"{self._budget} sizes are captured already"
            )
            return self.run_by_operator(args)
        if size in self.captured:
            return self._run_captured(args)
        try:
            return self._run_captured(args)
        except Exception as error:  # no streams or memory left for another capture, or npugraph_ex cannot compile
            raise_if_lost(error)
            if self.group is not None:
                raise
            log.warning("failed to capture a step of %d tokens; capturing no more sizes: %s", size[0], error)
            self._budget, self._failure = len(self.captured), f"it fails: {first_line(error)}"
            if has_state(self.traced.caches):  # which the step may have written over
                raise
            return self.run_by_operator(args)

    def _run_captured(self, args: Sequence[Any]) -> Sequence[Any]:
        """Replay a step of a planned size, or capture it."""
        fixed = self._in_place(args)
        scheduled = self.is_scheduled(fixed[self._ids_at].shape[1])
        if scheduled not in self._graphs:
            self._graphs[scheduled] = self._compile(scheduled)
        results = self._graphs[scheduled](*fixed)
        if (size := self._planned_size(args)) is not None:
            self.captured.add(size)
        return results

    def is_scheduled(self, tokens: int) -> bool:
        """True if steps of so many tokens run by a schedule.

        Those that decode steps are padded to; a step of a prompt that is as short runs as they do.
        """
        return (self._branches or self._fetches) and tokens <= min(self._max_num_seqs, MOST_TOKENS)

    def _planned_size(self, args: Sequence[Any]) -> tuple[int, int] | None:
        """(tokens, asked rows) of a step that got its size from ``size_for``."""
        lens_at = self.lists[0] if self.lists else self._lens_at
        if not self.planned or lens_at is None or len(args[lens_at]) != self._length:
            return None
        tokens = args[self._ids_at].shape[1]
        return tokens, tokens if self._rows_at is None else args[self._rows_at].shape[0]

    def _in_place(self, args: Sequence[Any]) -> list[Any]:
        """The same with the step's tensors copied to buffers that keep their addresses."""
        fixed = list(args)
        for i in self.changing:
            given: torch.Tensor = args[i]
            place = self._static.get((i, given.shape))
            if place is None:
                place = self._static[i, given.shape] = torch.empty_like(given, device=self.device)
            fixed[i] = place.copy_(sent(given, self.device))
        return fixed

    def _compile(self, scheduled: bool) -> Run:
        log.info("compiling for ACL graphs%s", ", with its schedule" if scheduled else "")

        def edit(gm: torch.fx.GraphModule, example_inputs: Any = None, config: Any = None) -> None:
            write_in_place(gm, example_inputs, config)
            if not scheduled:
                return
            for name, counted, place, label in (
                ("streams", self._branches, use_side_stream, f"{self._label}_side"),
                ("prefetch", self._fetches, use_prefetch_stream, f"{self._label}_fetch"),
            ):
                if counted and name not in self.dropped_schedules and (reason := place(gm, label)):
                    leave_out(name, reason, self.dropped_schedules)

        flat = flat_graph(self.traced, self._length, caches=self._caches, with_sizes=True)

        def compile_fx(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            for i in flat.constants:  # as torch._dynamo.mark_static_address does
                inputs[i]._dynamo_static_input_type = "guarded"
            npugraph_ex = torch.npu.npugraph_ex  # type: ignore[attr-defined]
            with ctrl_c_kept():
                keep_updates_apart()
                agree_on_captures(self.group)
                return npugraph_ex.compile_fx(gm, inputs, aclgraph_options(self._budget, self._options, edit))

        with tracing(TracingContext(self.traced.fake_mode)), torch.no_grad():
            run = aot_module_simplified(
                flat.module,
                flat.values,
                fw_compiler=compile_fx,
                decompositions={},
                keep_inference_input_mutations=True,
            )
        return lambda *args: run(*flat.flatten(args))


def aclgraph_options(
    budget: int, options: Mapping[str, Any] | None = None, edit: Callable[..., None] = write_in_place
) -> dict[str, Any]:
    """Options of npugraph_ex (torchair's repository, ``docs/zh/npugraph_ex``).

    - capture_limit: one above what we let it capture, so that a size that has to be captured anew is not refused.
    - clone_input off: it would copy a step's tensors to buffers of its own; they are in ours already.
    - frozen_parameter on: weights keep their addresses, so these are not part of the key of a captured graph.
    - pattern_fusion_pass off: it fuses norms with what follows to operators that nobody has held against the limits.
    - post_grad_custom_pre_pass: see ``in_place``, ``side_stream`` and ``prefetch_stream``.
    - reuse_graph_pool_in_same_fx stays on, clone_output off: the graphs of all sizes share their memory, results
      included. The logits of a step have to be used before the next one, as an engine does.

    Args:
        budget: sizes that are captured.
        options: others, see ``toolchain_options``.
        edit: the pass that edits the graph before those of npugraph_ex.
    """
    return {
        **(options or {}),
        "capture_limit": budget + 1,
        "clone_input": False,
        "frozen_parameter": True,
        "pattern_fusion_pass": False,
        "post_grad_custom_pre_pass": edit,
    }


def _why_not_captured(traced: TracedGraph, lists: Sequence[int]) -> str:
    """The reason why a captured graph would not be right or would not pay, or ""."""
    placeholders = traced.placeholders
    tables = [user for node in placeholders if node.name == "block_table" for user in readers(node)]
    if not tables and has_state(traced.caches):
        return "the graph has no attention call, whose lengths would give the number of sequences"
    if not tables or not all(_gets_new_lengths(table) or table.target in LENGTHS_ON_DEVICE for table in tables):
        return "the graph gathers cache blocks for the longest possible sequence"
    for user in (user for i in lists for user in placeholders[i].users):
        if not _gets_new_lengths(user):
            return f"{user.name} takes lengths from the host, but a replay updates those of attention calls only"
    return ""


def _attention_calls(traced: TracedGraph) -> int:
    """Calls that npugraph_ex gives the lengths of each replay."""
    return sum(_gets_new_lengths(node) for node in traced.graph.nodes)


def _gets_new_lengths(node: torch.fx.Node) -> bool:
    """True if npugraph_ex gives a call the lengths of each replay."""
    return str(node.target).startswith("npu.npu_fused_infer_attention_score")
