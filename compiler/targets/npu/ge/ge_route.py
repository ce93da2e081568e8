"""The route through the graph engine: torchair converts the lowered graph to GE, which compiles it as a whole.

The graph goes to torchair's backend directly, not through ``torch.compile``. Torchair's own AOTAutograd makes the
cache writes functional; its passes take the copies away again, so that GE writes into the caches.

Sizes of tensors stay dynamic. The lists of lengths are host inputs; their values are free and their lengths part of
the graph, so there is one graph for each number of sequences. Steps are padded to planned numbers to keep the graphs
few. Decode steps can have additional graphs of fixed sizes (``static_decode``).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from .....passes import TracedGraph
from .....runtime.cache.cache_specs import has_state
from .....runtime.parallel.group import RankGroup
from .....runtime.program import KVCache
from ..flat_graph import flat_graph
from ..in_place import write_rows_in_place
from ..route import PlannedSize, Route, Run, ctrl_c_kept
from ..schedules.schedule_options import leave_out
from ..schedules.side_branches import MOST_TOKENS
from ..sizes.capture_sizes import most_padding, padded_size, plan_capture_sizes
from ..sizes.step_padding import StepSize
from ..toolchain_options import set_ge_options
from ..warm_up.steps import StepShape, fitting_shape
from ..without_device import is_offline, without_device
from .air_kernels import register_air_kernels
from .converters import registered_converters
from .first_runs import FirstRuns
from .scheduled import WriteRowsAndSchedule, noted_schedules
from .static_decode import StaticDecode
from .static_graph import air_attention, static_graph

log = logging.getLogger(__name__)

SEQUENCES_PER_GRAPH = 8
MOST_GRAPHS = 8
"""How many numbers of sequences are planned unless it is said otherwise: one for each eight sequences, and no more
than eight, since GE takes a while to compile each graph. A handful of dummy sequences costs next to nothing."""

PREFILLED_TOKENS = 24
"""Tokens of chunks in the step of prefill and decode that a graph is compared on; its sizes are symbols."""


class GeGraphs(Route):
    """Runs a lowered graph by GE graphs, each compiled when it is first needed.

    In a Python with the offline toolchain torchair converts the graph all the same, and what it converted runs on the
    CPU, operator by operator.

    Args:
        traced: a graph lowered for ``graph_mode="ge"``; its constants are linked. Its nodes may have the notes of
            schedules (``passes.schedule``), which graphs of fixed sizes follow, of few tokens.
        sequences_per_graph: one number of sequences is planned for so many.
        most_graphs: and no more than this.
        eager: see ``Route``.
        options: of torchair, see ``toolchain_options``.
        static_decode: give decode steps graphs of fixed sizes, as many more.

    Attributes:
        static: these; None without them.
        verification: those of decode steps that verify drafts; None where there are none.
        planned: numbers of sequences that steps are padded to, ascending.
        graphs: number of sequences → its graph, as far as they are compiled; 0 → the only one of a graph that takes
            no lists of lengths.
        dropped: number of sequences → why its graph is not used.
    """

    name = "ge"

    def __init__(
        self,
        traced: TracedGraph,
        sequences_per_graph: int = SEQUENCES_PER_GRAPH,
        most_graphs: int = MOST_GRAPHS,
        eager: Run | None = None,
        options: Mapping[str, Any] | None = None,
        static_decode: bool = False,
    ) -> None:
        super().__init__(traced, eager)
        self._options = dict(options or {})
        self.static = StaticDecode(traced, self._compile_static) if static_decode else None
        if self.static is not None and self.static.refusal:
            for name in noted_schedules(traced.graph):
                leave_out(name, f"decode steps have no static graphs: {self.static.refusal}", self.dropped_schedules)
        self.verification: StaticDecode | None = None
        self._sequences_per_graph, self._most_graphs = sequences_per_graph, most_graphs
        self.planned: tuple[int, ...] = ()
        self.graphs: dict[int, Run] = {}
        self.dropped: dict[int, str] = {}
        self._first_runs = FirstRuns(self._drop, writes_state=has_state(traced.caches))

    @property
    def failure(self) -> str:
        return next(iter(self.dropped.values()), "")

    def plan(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> int:
        self.dropped.clear()
        mix = dict.fromkeys(range(1, max_num_seqs + 1), 1)
        limit = min(self._most_graphs, -(-max_num_seqs // self._sequences_per_graph))
        sizes = plan_capture_sizes(mix, max_num_seqs, limit)
        if self.lists:
            self.planned = sizes
            log.info("planned GE graphs for %s sequences", ", ".join(map(str, self.planned)))
        paddings = [most_padding(self.planned)]
        if self.static is not None:
            paddings.append(self.static.plan(sizes, max_model_len, self.block_size))
        self.verification, each = None, 1 + self._num_drafts
        fitting = [n for n in sizes if n * each <= max_num_batched_tokens]
        if self.static is not None and not self.static.refusal and 1 < each <= max_model_len and fitting:
            self.verification = StaticDecode(self.traced, self._compile_static, self._num_drafts)
            self.verification.first_runs.falls_back = self.group is None
            paddings.append(self.verification.plan(fitting, max_model_len, self.block_size))
        return max(paddings)

    def _statics(self) -> list[StaticDecode]:
        return [static for static in (self.static, self.verification) if static is not None]

    def join(self, group: RankGroup | None) -> None:
        super().join(group)
        self._first_runs.falls_back = group is None
        for static in self._statics():
            static.first_runs.falls_back = group is None

    def bind(self, kv_cache: KVCache) -> None:
        """Take notice of the caches that later calls receive; graphs of fixed sizes are thrown away."""
        super().bind(kv_cache)
        for static in self._statics():
            static.bind(kv_cache)

    def planned_sizes(self) -> list[PlannedSize]:
        sizes = [n for n in reversed(self.planned) if n not in self.dropped]
        if not self.lists and 0 not in self.dropped:
            return [*self._static_sizes(), self._planned_size(0, self._max_num_seqs)]
        below = dict(zip(self.planned, (0, *self.planned), strict=False))
        # With a dummy sequence where another size does not take the step.
        return [*self._static_sizes(), *(self._planned_size(n, n - (n - below[n] > 1)) for n in sizes)]

    def _static_sizes(self) -> list[PlannedSize]:
        """Those of the graphs of fixed sizes, which decode steps run by."""
        return [
            PlannedSize(
                name=f"{static.kind} steps of {n} sequences",
                shapes=(StepShape(real * (1 + static.drafts), real, static.drafts),) * 2,
                compile=partial(static.graph, n),
                run=partial(self._run_static, static, n),
                drop=partial(static.drop, n),
            )
            for static in self._statics()
            for n, real in reversed(
                [(n, n - (n - below > 1)) for below, n in itertools.pairwise((0, *static.planned))]
            )
            if n not in static.dropped
        ]

    def _run_static(self, static: StaticDecode, sequences: int, args: Sequence[Any]) -> Sequence[Any]:
        return static.run_graph(sequences, self.on_device(args))

    def _planned_size(self, length: int, sequences: int) -> PlannedSize:
        """That of the graph for lists of ``length``; it is exercised by steps of so many sequences."""
        longest, most = self._max_model_len, self._max_num_batched_tokens
        sequences = min(sequences, most)
        # Where a step takes no more tokens than sequences, one sequence less leaves two tokens to another.
        fewer = sequences if length else max(1, min(sequences, most - 1))
        mixed = fitting_shape(min(most, sequences + PREFILLED_TOKENS), fewer, longest)
        return PlannedSize(
            name=f"steps of {length} sequences" if length else "steps of any number of sequences",
            # Decode steps are for graphs of fixed sizes, where there are any.
            shapes=(mixed, mixed) if self._static_sizes() else (StepShape(sequences, sequences), mixed),
            compile=partial(self._graph, length),
            run=partial(self._run, length),
            drop=partial(self._drop, length),
        )

    def _drop(self, length: int, reason: str) -> None:
        self.dropped[length] = reason
        self.graphs.pop(length, None)
        self._first_runs.forget(length)

    def size_for(self, size: StepSize) -> StepSize | None:
        """The next planned number of sequences; each dummy one has a token."""
        for static in self._statics():
            if (fixed := static.size_for(size)) is not None:
                return fixed
        sequences = padded_size(size.sequences, [n for n in self.planned if n not in self.dropped])
        if sequences is None or not 0 < sequences - size.sequences <= self.most_dummies:
            return None
        return replace(size, tokens=size.tokens + sequences - size.sequences, sequences=sequences)

    def __call__(self, *args: Any) -> Sequence[Any]:
        for static in self._statics():
            sequences = static.sequences_of(args)
            if sequences is not None and (outputs := static.run(sequences, self.on_device(args))) is not None:
                return outputs
        length = len(args[self.lists[0]]) if self.lists else 0
        if length in self.dropped:
            self.note_eager(f"the graph for {length} sequences was dropped: {self.dropped[length]}")
            return self.run_by_operator(args)
        if self.is_warm and length not in self.graphs:
            self.note_eager(f"no graph for {length} sequences is planned")
            return self.run_by_operator(args)
        outputs = self._first_runs.attempt(length, self._graph, self.on_device(args))
        return self(*args) if outputs is None else outputs

    def _run(self, length: int, args: Sequence[Any]) -> Sequence[Any]:
        return self._first_runs.run(length, self._graph, self.on_device(args))

    def _graph(self, length: int) -> Run:
        if length not in self.graphs:
            log.info("compiling the GE graph for %d sequences", length)
            self.graphs[length] = self._compile(length)
        return self.graphs[length]

    def _compile(self, length: int) -> Run:
        flat = flat_graph(self.traced, length)
        run = self._compiled(flat.module, flat.values, flat.constants, self.traced.fake_mode, static=False)
        return lambda *args: run(*flat.flatten(args))

    def _compile_static(self, inputs: Mapping[str, torch.Tensor]) -> Run:
        with ctrl_c_kept():
            attention = air_attention()
        copy = static_graph(self.traced, inputs, attention)
        few = inputs[self.traced.input_ids].shape[1] <= MOST_TOKENS
        edit: Callable[..., None] = WriteRowsAndSchedule(self.dropped_schedules) if few else write_rows_in_place
        run = self._compiled(copy.module, copy.values, copy.fixed, copy.fake_mode, static=True, edit=edit)
        return lambda *args: run(*copy.flatten(args))

    def _compiled(
        self,
        module: fx.GraphModule,
        values: list[Any],
        fixed: Iterable[int],
        mode: FakeTensorMode,
        *,
        static: bool,
        edit: Callable[..., None] = write_rows_in_place,
    ) -> Run:
        """A module as torchair runs it; ``fixed`` are positions of values that keep their addresses."""
        assert self.traced.npu is not None
        for i in fixed:  # as torch._dynamo.mark_static_address does
            values[i]._dynamo_static_input_type = "guarded"
        soc = self.traced.npu.soc
        return compile_module(module, values, mode, soc, self._options, static=static, edit=edit)


def compile_module(
    module: fx.GraphModule,
    values: list[Any],
    mode: FakeTensorMode,
    soc: str,
    options: Mapping[str, Any] | None = None,
    *,
    static: bool = False,
    edit: Callable[..., None] = write_rows_in_place,
) -> Run:
    """A module as torchair runs it.

    Args:
        module: its placeholders are the inputs.
        values: of the placeholders, fake tensors of ``mode``.
        mode: of these.
        soc: name of the chip, for a Python with the offline toolchain.
        options, static, edit: see ``ge_config``.
    """
    with ctrl_c_kept():
        import torchair

    with ExitStack() as stack:
        offline = is_offline()
        if offline:
            stack.enter_context(without_device(soc))
        stack.enter_context(registered_converters())
        if offline:
            register_air_kernels()
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(torch.no_grad())
        config = ge_config(options, run_eagerly=offline, static=static, edit=edit)
        run: Run = torchair.get_npu_backend(compiler_config=config)(module, values)
    return run


def ge_config(
    options: Mapping[str, Any] | None = None,
    *,
    run_eagerly: bool = False,
    static: bool = False,
    edit: Callable[..., None] = write_rows_in_place,
) -> Any:
    """Torchair's options, as far as they differ from its defaults or matter here (its documentation, "features").

    - mode max-autotune: through GE.
    - pattern_fusion_pass off: it fuses norms with what follows, after our passes, to operators that nobody has held
      against the limits.
    - frozen_parameter on: GE receives the addresses of weights once, not at every launch. Weights do not move;
      ``weight_guard`` raises if one does. Caches move when an engine is made, so they are marked only in graphs of
      fixed sizes, which are made for the caches as bound.
    - enable_view_optimize, remove_noop_ops and keep_inference_input_mutations are on by default.
    - enable_ref_data stays off: torchair's removal of copies leaves none to the caches.
    - tiling_schedule_optimize, for graphs of fixed sizes alone: what an operator's tiling depends on, attention's
      lengths, is looked at on the device, so that the graph need not be cut in front of it.
    - topology_sorting_strategy "StableRDFS", for the same: operators keep the order of the graph.

    - post_grad_custom_pre_pass: see ``in_place`` and ``scheduled``.

    Matrices in format FRACTAL_NZ need no option: torchair reads the format off the tensors at the first call.

    Args:
        options: others, by their paths, see ``toolchain_options``.
        run_eagerly: convert the graph, and run what was converted operator by operator.
        static: for a graph of fixed sizes.
        edit: the pass that edits the graph before those of torchair.
    """
    import torchair

    config = torchair.CompilerConfig()
    set_ge_options(config, options or {})
    config.mode = "max-autotune"
    config.post_grad_custom_pre_pass = edit
    config.experimental_config.pattern_fusion_pass = False
    config.experimental_config.frozen_parameter = True
    if static:
        config.experimental_config.tiling_schedule_optimize = True
        config.experimental_config.topology_sorting_strategy = "StableRDFS"
    config.debug.run_eagerly = run_eagerly
    return config
