"""Links a compiled graph to its weights, caches and step metadata: the Program that the runtime runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from ...passes import TracedGraph
from ...passes.graph.notes import PackedWeight, fewest_bits
from ...runtime.cache.cache_specs import has_state
from ...runtime.memory import give_back_freed_memory
from ...runtime.ops.linear.stored_weight import StoredWeight
from ...runtime.parallel.group import RankGroup, StageGroup
from ...runtime.phases import phase, timed
from ...runtime.program import CachePart, CacheSpec, KVCache, StateSpec, is_cache_input
from ...runtime.state_tables import CHUNK_TABLES, MOST_CHUNKED_TOKENS
from ...runtime.step_metadata import StepMetadata
from ..report import CompileReport
from ..targets.cpu.kernels import GraphCalls, kernel_calls
from ..targets.cpu.recorded_step import RecordedSteps
from ..targets.npu.route import Route
from ..targets.npu.warm_up.warm_up import warm_up
from ..tolerance import Tolerance
from ..weights.file_pages import FilePages, will_read
from ..weights.merged_weights import merge_inputs, merge_rows
from .linkage import Linkage
from .packed_rows import check_rows, pack_rows, packed_apart
from .stages import stage_of


def link(
    traced: TracedGraph,
    run: Callable[..., Sequence[Any]],
    report: CompileReport | None = None,
    *,
    restart_length: int | None = None,
    merge: bool = True,
) -> LinkedProgram:
    """The program of a rewritten graph that ``run`` was made from.

    Linking moves parameters that the graph reads as rows of a merged tensor (see ``merged_weights``).

    Args:
        traced: the graph.
        run: function of its inputs.
        report: how it was compiled.
        restart_length: see ``Linkage``.
        merge: merge all rows now; else those that are packed stay where they are, and packing has to come first.
    """
    linkage = Linkage.of(traced, restart_length)
    merge_linked(linkage, traced.constants, packed=merge)
    return LinkedProgram(linkage, traced.constants, run, report)


def link_stage(
    traced: TracedGraph, stage: int, report: CompileReport, *, restart_length: int | None = None, merge: bool = True
) -> LinkedProgram:
    """As ``link``, of one stage of a graph that is parted."""
    module, linkage = stage_of(traced.graph, Linkage.of(traced, restart_length), stage)
    constants = dict(traced.constants)
    merge_linked(linkage, constants, packed=merge)
    return LinkedProgram(linkage, constants, kernel_calls(module), report)


def merge_linked(linkage: Linkage, constants: dict[str, torch.Tensor], *, packed: bool) -> None:
    """Merge the rows of a program's inputs (see ``merged_weights``), of those that are packed only if ``packed``."""
    later = () if packed else {weight.name for weight in linkage.packed}
    merge_inputs({name: rows for name, rows in linkage.merged.items() if name not in later}, constants)


class LinkedProgram:
    """A flat step of T tokens as a callable (see ``runtime.program.Program``).

    Args:
        linkage: what the inputs of the graph receive.
        constants: input → tensor, those of merged inputs among them.
        run: function of the graph's inputs, in order; a ``Route`` chooses the sizes of steps.
        report: how it was compiled.

    Attributes:
        linkage: as given.
        whole_caches: see ``runtime.program.Program``.
        copied_weights: the module's tensors that the program holds packed copies of, or constants computed from or
            numbers read off; a change of their values does not reach it.
        weight_bits: the fewest that weights are rounded to, or, of those that a checkpoint stores so, their inputs;
            None where none is.
        tolerance: by how much steps that run as whole graphs may differ from their operators called one by one; None:
            what holds for the dtype of the logits.
        group: the ranks that run the program together; None where this process does alone.
        hidden, hidden_form: see ``runtime.program.TappedProgram``; None without ``CompileOptions.taps_hidden``.
    """

    def __init__(
        self,
        linkage: Linkage,
        constants: Mapping[str, torch.Tensor],
        run: Callable[..., Sequence[Any]],
        report: CompileReport | None = None,
    ) -> None:
        self.linkage = linkage
        self.report = report if report is not None else CompileReport("")
        held = range(len(linkage.caches)) if linkage.held is None else linkage.held
        self.caches: list[CacheSpec | StateSpec] = [
            spec if i in held else spec.elsewhere() for i, spec in enumerate(linkage.caches)
        ]
        self.whole_caches = list(linkage.caches)
        self.max_model_len = linkage.max_model_len
        self.restart_length = linkage.restart_length
        self.rope_switch = linkage.rope_switch
        self.vocab_size = linkage.vocab_size
        self.device = linkage.device
        self.block_size = linkage.block_size
        self.tolerance: Tolerance | None = None
        self._group: RankGroup | None = None
        self._run = run
        self._route = run if isinstance(run, Route) else None
        self._args: list[Any] = [constants.get(name) for name in linkage.inputs]
        self._at = {name: i for i, name in enumerate(linkage.inputs)}
        self._input_ids = self._at[linkage.input_ids]
        self._position_ids = self._at.get(linkage.position_ids, -1)
        self._fields = [(self._at[name], name) for name in linkage.step_inputs]
        self._sizes = [self._at[name] for name in linkage.token_counts]
        self._in_chunks = any(name.startswith(CHUNK_TABLES) for name in linkage.step_inputs)
        self._writes_all_states = self.block_size is not None and has_state(self.caches)
        self._gathers = "logits_rows" in linkage.step_inputs
        self.hidden: torch.Tensor | None = None
        self.hidden_form = linkage.hidden
        self._bound = not self.caches
        self._recorded = self._records(run, linkage)
        self._read = [self._at[name] for name in linkage.inputs if name in linkage.read]
        self._merged = dict(linkage.merged)
        self._packable = list(linkage.packed)
        self.weight_bits = fewest_bits(self._packable)
        self.copied_weights = [constants[name] for name in linkage.folded]

    @property
    def group(self) -> RankGroup | None:
        return self._group

    @group.setter
    def group(self, group: RankGroup | None) -> None:
        self._group = group
        if self._route is not None:
            self._route.join(group)

    def _records(self, run: Callable[..., Sequence[Any]], linkage: Linkage) -> RecordedSteps | None:
        """Recorded small steps of a graph that is called kernel by kernel; None for others, and for what was lowered
        for an NPU, whose operators take lengths as lists."""
        if not isinstance(run, GraphCalls) or self.device.type != "cpu" or not self.caches or self.block_size:
            return None
        received = [value.name for value in linkage.received]
        names = [linkage.input_ids, *filter(None, [linkage.position_ids]), *linkage.step_inputs, *received]
        tables = [self._at[name] for name in linkage.step_inputs if name.startswith("block_table")]
        return RecordedSteps(run, [self._at[name] for name in names], tables)

    @property
    def merged_weights(self) -> list[torch.Tensor]:
        """The module's tensors that the program reads as rows of merged ones."""
        return [self._args[self._at[source]] for sources in self._merged.values() for source in sources]

    def reserve(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int = 0) -> int:
        """Plan for steps up to these sizes; how many blocks at the end of the caches the program needs for itself.

        Raises:
            ValueError: steps would be larger than recurrences of a program for an NPU take.
        """
        most = min(max_num_batched_tokens, max_model_len)
        if self._in_chunks and most > MOST_CHUNKED_TOKENS:
            raise ValueError(
                f"max_num_batched_tokens={max_num_batched_tokens}: the recurrences of this program support at "
                f"most {MOST_CHUNKED_TOKENS} tokens of a sequence per step; lower it to {MOST_CHUNKED_TOKENS}"
            )
        if self._route is None:
            return 0
        return self._route.reserve(max_num_seqs, max_num_batched_tokens, max_model_len, num_drafts)

    def bind(self, kv_cache: KVCache) -> None:
        """Give the program its caches: per entry of ``caches`` its tensors, as ``allocate_kv_cache`` makes them.

        Raises:
            ValueError: their number, heads, sizes or dtype do not fit.
        """
        if len(kv_cache) != len(self.caches):
            raise ValueError(f"kv_cache has {len(kv_cache)} entries; the program needs {len(self.caches)}")
        for i, (tensors, spec) in enumerate(zip(kv_cache, self.caches, strict=True)):
            parts = spec.parts()
            if len(tensors) != len(parts):
                raise ValueError(
                    f"kv_cache[{i}] has {len(tensors)} tensors; give {', '.join(part.name for part in parts)}"
                )
            for part, tensor in zip(parts, tensors, strict=True):
                if isinstance(spec, StateSpec):
                    self._bind(f"{part.name}_{i}", _state_tensor(i, part, tensor))
                    continue
                size = tensor.shape[2 if part.by_head else 1] if tensor.dim() > 2 else 0
                if tensor.shape[1:] != part.block_shape(size) or tensor.dtype != part.dtype:
                    inner = ", ".join(map(str, part.block_shape("block_size")))
                    raise ValueError(
                        f"kv_cache[{i}] {part.name} is {tuple(tensor.shape)} {tensor.dtype}; "
                        f"give [num_blocks, {inner}] {part.dtype}"
                    )
                if size != (self.block_size or size):
                    raise ValueError(
                        f"kv_cache[{i}] {part.name} has blocks of {size} tokens; the program was compiled "
                        f"for block_size={self.block_size}"
                    )
                self._bind(f"{part.name}_{i}", tensor)
        if self._route is not None:
            self._route.bind(kv_cache)
        if self._recorded is not None:
            self._recorded.clear()
        self._bound = True

    def _bind(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._at:  # else another stage reads it
            self._args[self._at[name]] = tensor

    def warm_up(self) -> None:
        """Compile or capture every planned size of steps, and compare each; ``report.sizes`` says what became of it.
        Nothing happens where none is planned.

        Raises:
            DeviceLost: the device computes nothing any more.
        """
        if self._route is None:
            return
        with timed(self.report.seconds):
            self.report.sizes = warm_up(self, self._route)
        self.report.size_limits = list(self._route.limits)

    def mode(self, step: StepMetadata) -> str:
        """The name of the way in which a step is going to run, which is the same on all ranks."""
        return "" if self._route is None else self._route.mode(step)

    def graph_stats(self) -> dict[str, int]:
        """Figures of steps that run as whole graphs on an NPU: ``graph_sizes`` ready, ``graph_sizes_dropped`` in
        warm-up, ``operator_steps`` that ran operator by operator. Empty where none could."""
        if self._route is None:
            return {}
        dropped = sum(bool(size.reason) for size in self.report.sizes)
        return {
            "graph_sizes": len(self.report.sizes) - dropped,
            "graph_sizes_dropped": dropped,
            "operator_steps": self._route.eager_steps.total(),
        }

    @phase("pack")
    def pack_weights(self, *, release: bool, check: bool = False) -> int:
        """Lay the weights of packed linears out for the CPU's matrix kernels, and round those of quantized ones, one
        at a time.

        Args:
            release: free each source once it is packed, unless something else reads it. Only for weights that
                nobody else uses: the module cannot run by itself afterwards.
            check: compare rounded weights, and products with them, with what they should be, see
                ``check_rounded_weight``.

        Returns:
            bytes of packed weights.

        Raises:
            UnsupportedModel: a rounded weight is wrong.
        """
        size = 0
        give_back_freed_memory()  # of what was computed so far: packed weights are beside their sources for a while
        merged = [self._args[self._at[name]] for packed in self._packable for name in (packed.name, *packed.sources)]
        pages = FilePages(tensor for tensor in merged if tensor is not None)
        pages.drop_tensors(merged)  # what the comparison has read of files is read once more
        # Those first that oneDNN lays out, which takes their memory twice, and the head is the largest.
        for packed in sorted(self._packable, key=lambda packed: packed.quantization is not None):
            i, sources = self._at[packed.name], [self._args[self._at[name]] for name in packed.sources]
            will_read([self._args[i], *sources])
            whole = self._args[i]  # None for rows that were not merged yet
            if whole is None and not packed_apart(sources, packed):
                whole = merge_rows(sources, pages)
            rows, read = (sources, sources) if whole is None else ([whole], [whole, *sources])
            self._args[i] = pack_rows(rows, packed)
            if check and packed.quantization is not None:
                check_rows(rows, self._args[i], packed)
            size += self._args[i].numel() * self._args[i].element_size()
            self._merged.pop(packed.name, None)
            if not release:
                self.copied_weights += sources
                continue
            for tensor in read:
                if any(self._args[j] is tensor for j in self._read):
                    continue
                pages.drop_tensors([tensor])
                if isinstance(tensor, StoredWeight):
                    tensor.release()
                else:
                    tensor.data = tensor.new_empty(0)
        self._packable = []
        size += self._unpack_stored(release)
        give_back_freed_memory()
        if self._recorded is not None:
            self._recorded.clear()
        return size

    def release_all_but_own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Free tensors of a module, of which the program reads parts that it has packed or holds by itself."""
        own = {id(given) for given in self._args}
        for tensor in tensors:
            if id(tensor) in own:
                continue
            if isinstance(tensor, StoredWeight):
                tensor.release()
            else:
                tensor.data = tensor.new_empty(0)

    def packed_weights(self) -> list[tuple[PackedWeight, torch.Tensor]]:
        """The weights that are packed, with what was noted of them; none before ``pack_weights``."""
        return [] if self._packable else [(noted, self._args[self._at[noted.name]]) for noted in self.linkage.packed]

    def share_weights(self, other: LinkedProgram) -> None:
        """Take the weights of a program that has all inputs of this one, packed as they are there."""
        for name, i in self._at.items():
            if not is_cache_input(name):
                self._args[i] = other._args[other._at[name]]
        self._packable = []
        if self._recorded is not None:
            self._recorded.clear()

    def share_inputs(self, other: LinkedProgram, names: Mapping[str, str]) -> list[str]:
        """Take tensors that another program has already, packed as they are there.

        Args:
            other: its weights are packed.
            names: own input → the input of ``other`` that receives the same tensor of the model.

        Returns:
            The inputs that are shared: the others are read otherwise there.
        """
        theirs = {(packed.sources, packed.quantization): packed.name for packed in other.linkage.packed}
        shared = []
        for packed in list(self._packable):
            sources = tuple(names.get(source, "") for source in packed.sources)
            name = theirs.get((sources, packed.quantization))
            if name is not None:
                self._args[self._at[packed.name]] = other._args[other._at[name]]
                self._packable.remove(packed)
                shared.append(packed.name)
        for own, name in names.items():
            if self._at.get(own) in self._read and own not in shared and name in other.linkage.read:
                self._args[self._at[own]] = other._args[other._at[name]]
                shared.append(own)
            elif own in self._at and self._at[own] not in self._read:
                self._args[self._at[own]] = torch.empty(0)
        if self._recorded is not None:
            self._recorded.clear()
        return shared

    @property
    def has_stored_weights(self) -> bool:
        """Some weights are still as a quantized checkpoint stores them, which no kernel reads."""
        return any(isinstance(given, StoredWeight) for given in self._args)

    def _unpack_stored(self, release: bool) -> int:
        """Make ordinary tensors of the stored weights that are left, and free these with ``release``; their bytes."""
        for name, sources in self._merged.items():
            if self._args[self._at[name]] is None:
                self._args[self._at[name]] = merge_rows([self._args[self._at[source]] for source in sources])
        size, dense = 0, dict[int, torch.Tensor]()
        left = []
        for i, given in enumerate(self._args):
            if not isinstance(given, StoredWeight):
                continue
            left.append(given)
            if i not in self._read:
                self._args[i] = torch.empty(0)
                continue
            if id(given) not in dense:
                dense[id(given)] = given.dense().contiguous()
                size += given.numel() * given.element_size()
            self._args[i] = dense[id(given)]
        if release:
            for given in left:
                given.release()
        return size

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Run one flat step: ``[1, T]`` ids and positions → ``[R, vocab_size]`` logits of the asked rows; the program
        of a stage that is not the last one passes on what the next one reads."""
        asked = step.logits_rows.shape[0]
        if self._writes_all_states:
            check_all_write(step)
        if self._route is not None:
            input_ids, position_ids, step = self._route.fit(input_ids, position_ids, step)
        args = self.arguments(input_ids, position_ids, step)
        if received := self.linkage.received:
            args[-len(received) :] = self._stages.receive(received, input_ids.shape[1])
        with torch.no_grad():
            outputs = self._run(*args) if self._recorded is None else self._recorded(args)
        if self.linkage.sent:
            self._stages.pass_on(outputs)
            return outputs[0]  # type: ignore[no-any-return]
        logits = self.logits(outputs, step)
        self.hidden = None if self.hidden_form is None else outputs[1][0]
        return logits if self._route is None else logits[:asked]

    @property
    def _stages(self) -> StageGroup:
        return cast(StageGroup, self.group)

    def arguments(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> list[Any]:
        """Values of the graph's inputs for a step."""
        if not self._bound:
            raise RuntimeError("the program has no KV cache; call bind() first")
        args = list(self._args)
        args[self._input_ids] = input_ids
        if self._position_ids >= 0:
            args[self._position_ids] = position_ids
        for i, name in self._fields:
            args[i] = step.field(name)
        for i in self._sizes:
            args[i] = input_ids.shape[1]
        if self._route is None and self.device.type != "cpu":
            args = [x.to(self.device) if isinstance(x, torch.Tensor) else x for x in args]
        return args

    def logits(self, outputs: Sequence[Any], step: StepMetadata) -> torch.Tensor:
        """``[R, vocab_size]`` logits of the rows that a step asks for, of what the graph yields for it."""
        logits: torch.Tensor = outputs[0][0]
        # Without the pass that gathers the asked rows in front of the head they are taken from all.
        return logits if self._gathers else logits[step.logits_rows]


def check_all_write(step: StepMetadata) -> None:
    """Check what a program for an NPU takes for granted of states.

    Raises:
        ValueError: a sequence without tokens, or without a slot to write.
    """
    if step.state_read is None or step.state_write is None:
        raise ValueError("the model has recurrent state; give state_read and state_write")
    if bool((step.state_write < 0).any()) or bool((step.query_start_loc.diff() < 1).any()):
        raise ValueError(
            "a program for an NPU writes the state of every sequence; give each at least one token and, in "
            "state_write, a slot"
        )


def _state_tensor(index: int, part: CachePart, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.shape[1:] != part.unit_shape or tensor.dtype != part.dtype:
        inner = ", ".join(map(str, part.unit_shape))
        raise ValueError(
            f"kv_cache[{index}] {part.name} is {tuple(tensor.shape)} {tensor.dtype}; "
            f"give [num_slots, {inner}] {part.dtype}"
        )
    return tensor
