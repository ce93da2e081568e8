"""The object that passes rewrite: a traced graph with its real inputs and its runtime inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...runtime.npu_target import NpuTarget
from ...runtime.ops.linear.quantized_weight import Quantization
from ...runtime.ops.linear.stored_weight import StoredWeight
from ...runtime.program import CacheSpec, StateSpec
from ...runtime.step_metadata import TOKEN_FIELDS
from ...runtime.window_blocks import WINDOW_LENS
from .fx_nodes import cache_index, value
from .notes import GraphNotes

if TYPE_CHECKING:
    import sympy


class UnsupportedModel(ValueError):
    """A model that cannot be served exactly. The message says which part of it and why."""


class NotFinite(UnsupportedModel):
    """A model whose own logits are NaN or infinite: nothing that runs its weights does better."""


@dataclass
class TracedGraph:
    """A graph whose parameters are inputs: first Dynamo's, of torch functions and methods, then the ATen graph that
    AOTAutograd makes of it.

    Attributes:
        module: the graph module; passes edit its graph in place.
        fake_mode: the mode of all recorded example values.
        constants: placeholder name → real tensor (parameters, buffers, tensors that passes add).
        input_ids: name of the token placeholder; "" in drop-in graphs.
        position_ids: name of the position placeholder; "" when the model takes none.
        caches: per cache pair or state inserted so far, what it stores.
        step_inputs: names of the step-metadata placeholders that were inserted.
        max_positions: positions that the model supports, or None.
        taps_hidden: the graph also yields what the head reads, ``[1, T, hidden_size]``; see ``gather_logits``.
        paged: the graph is a flat ``[1, T]`` step over paged caches (else: the user's own call).
        npu: the Ascend chip that it is lowered for; None for a CPU.
        cache_dtype: that the paged caches are to have; None for the one that keys and values are computed in.
        quantization: how linear layers are to be rounded; None: not at all.
        input_bits: that inputs keep of stored weights that were made for inputs of 8 bits: 16, or None for 8.
        ranks: processes that run it together; 1: this one alone.
        rank: of this process among them.
        expert_groups: of ranks that hold different experts; None: as many as there can be.
        notes: facts that one pass leaves for later ones, for linking and for the self-check.
    """

    module: fx.GraphModule
    fake_mode: FakeTensorMode
    constants: dict[str, torch.Tensor]
    input_ids: str = ""
    position_ids: str = ""
    caches: list[CacheSpec | StateSpec] = field(default_factory=list)
    step_inputs: list[str] = field(default_factory=list)
    max_positions: int | None = None
    taps_hidden: bool = False
    paged: bool = True
    npu: NpuTarget | None = None
    cache_dtype: torch.dtype | None = None
    quantization: Quantization | None = None
    input_bits: int | None = None
    ranks: int = 1
    rank: int = 0
    expert_groups: int | None = None
    notes: GraphNotes = field(default_factory=GraphNotes)
    _origin: fx.Node | None = field(default=None, init=False, repr=False)

    @property
    def graph(self) -> fx.Graph:
        """The nodes, in the order that they run in."""
        return self.module.graph

    @property
    def placeholders(self) -> list[fx.Node]:
        """The graph inputs, in the order that the graph takes them."""
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    def placeholder(self, name: str) -> fx.Node:
        """The graph input of that name.

        Raises:
            StopIteration: there is none.
        """
        return next(n for n in self.placeholders if n.name == name)

    @property
    def token_symbol(self) -> sympy.Symbol:
        """The symbol of T, the number of tokens of a flat step."""
        return value(self.placeholder(self.input_ids)).shape[1].node.expr

    @property
    def output(self) -> fx.Node:
        """The node that returns the results: ``output.args[0]`` is the tuple of them, in a flat step the logits, and
        the hidden rows if it ``taps_hidden``."""
        return next(n for n in reversed(self.graph.nodes) if n.op == "output")

    def copy(self) -> TracedGraph:
        """An independent graph over the same constants."""
        nodes: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        for node in self.graph.nodes:
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
        return self.over(fx.GraphModule(self.module, graph))

    def over(self, module: fx.GraphModule) -> TracedGraph:
        """The same inputs and notes over another graph module."""
        return replace(
            self,
            module=module,
            constants=dict(self.constants),
            caches=list(self.caches),
            step_inputs=list(self.step_inputs),
            notes=self.notes.copy(),
        )

    @contextmanager
    def before(self, node: fx.Node, like: fx.Node | None = None) -> Iterator[None]:
        """Set the insertion point in front of ``node``; what is inserted counts as part of ``like``'s module."""
        outer = self._origin
        self._origin = node if like is None else like
        try:
            with self.graph.inserting_before(node):
                yield
        finally:
            self._origin = outer

    def substitute(self, old: fx.Node, new: fx.Node) -> None:
        """Replace ``old`` with ``new`` and erase ``old``.

        Raises:
            ValueError: they differ in dtype or shape.
        """
        before, after = value(old), value(new)
        if before.dtype != after.dtype or str(tuple(before.shape)) != str(tuple(after.shape)):
            raise ValueError(
                f"{new.name} ({after.dtype} {tuple(after.shape)}) cannot replace {old.name} "
                f"({before.dtype} {tuple(before.shape)})"
            )
        if str(before.stride()) != str(after.stride()):
            for user in old.users:
                if user.target is torch.ops.aten.view.default:  # may need a copy now
                    user.target = torch.ops.aten.reshape.default
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a function call at the graph's insertion point, with its fake value computed."""
        return self._inserted(self.graph.call_function(target, args, kwargs))

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a method call at the graph's insertion point, with its fake value computed."""
        return self._inserted(self.graph.call_method(name, args, kwargs))

    def _inserted(self, node: fx.Node) -> fx.Node:
        self.adopt(node, None)
        self.propagate(node)
        return node

    def adopt(self, node: fx.Node, example: Any) -> None:
        """Set the fake value of a node to ``example``, and its provenance to that of the insertion point.

        For passes that insert nodes into ``graph`` themselves; ``call`` and ``method`` do this already.
        """
        if self._origin is not None:
            for key in ("nn_module_stack", "stack_trace"):
                if key in self._origin.meta:
                    node.meta[key] = self._origin.meta[key]
        node.meta["example_value"] = example

    def propagate(self, node: fx.Node) -> None:
        """Compute the fake value of ``node`` from those of its inputs.

        For passes that change the arguments of a node that is there, so that its layout or shape may differ.
        """
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        with self.fake_mode, enable_python_dispatcher(), torch.no_grad():
            if node.op == "call_method":
                result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                result = node.target(*args, **kwargs)  # type: ignore[operator]
        node.meta["example_value"] = result

    def propagate_or_copy(self, node: fx.Node) -> None:
        """The same; a view that new strides do not allow becomes a reshape, which copies."""
        try:
            self.propagate(node)
        except (RuntimeError, ValueError):
            if node.target not in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
                raise
            node.target = torch.ops.aten.reshape.default
            self.propagate(node)

    def add_constant(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """A new graph input that always receives ``tensor``."""
        self.constants[name] = tensor
        if isinstance(tensor, StoredWeight):
            with self.fake_mode:
                tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
        if self.ranks > 1:  # whose parts are moved to the device at the end
            device = value(self.placeholder(self.input_ids)).device
            with self.fake_mode:
                tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return self._add_placeholder(name, tensor, dynamic=())

    def shared_constant(self, name: str, make: Callable[[], torch.Tensor]) -> fx.Node:
        """The graph input ``name``, which always receives what ``make`` returns; it is called on first use."""
        return self.placeholder(name) if name in self.constants else self.add_constant(name, make())

    def add_deferred_constant(self, name: str, example: torch.Tensor) -> fx.Node:
        """A new graph input that always receives one tensor, which linking makes; ``example`` is its fake."""
        return self._add_placeholder(name, example, dynamic=())

    def add_position_input(self) -> fx.Node:
        """A ``position_ids`` placeholder for a model that takes none."""
        tokens = value(self.placeholder(self.input_ids))
        with self.fake_mode:
            example = torch.empty(tokens.shape, dtype=torch.int64, device=tokens.device)
        node = self._add_placeholder("position_ids", example, ())
        self.position_ids = node.name
        return node

    def step_input(self, field: str, group: int = 0) -> fx.Node:
        """The placeholder of a field of ``StepMetadata``; made on first use.

        Args:
            field: its name.
            group: which group of layers it is for, or the number that follows its name, see ``StepMetadata.field``.
        """
        name = f"{field}_{group}" if group else field
        for node in self.placeholders:
            if node.name == name:
                return node
        device = value(self.placeholder(self.input_ids)).device
        tokens = value(self.placeholder(self.input_ids)).shape[1]
        with self.fake_mode:
            per_token = torch.empty((tokens,), dtype=torch.int64, device=device)
        if field in ("query_ends", "query_lens", "kv_lens", "state_reads") or field.startswith(WINDOW_LENS):
            return self._new_step_input(name, field, [5, 9, 10, 17, 23])
        examples: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {
            "slot_mapping": (per_token, ()),
            "token_lengths": (per_token, ()),
            "row_of_token": (per_token, ()),
            "padded_tokens": (torch.zeros(5, 9, dtype=torch.int64, device=device), (0, 1)),
            "block_table": (torch.zeros(5, 7, dtype=torch.int32, device=device), (0, 1)),
            "query_start_loc": (torch.zeros(6, dtype=torch.int32, device=device), (0,)),
            "seq_lens": (torch.zeros(5, dtype=torch.int32, device=device), (0,)),
            "logits_rows": (torch.zeros(3, dtype=torch.int64, device=device), (0,)),
            "state_read": (torch.zeros(5, dtype=torch.int32, device=device), (0,)),
            "state_write": (torch.zeros(5, dtype=torch.int32, device=device), (0,)),
            # For convolutions of so many taps, and recurrences in chunks of at most so many tokens (state_tables).
            "kept_rows": (torch.zeros(5, max(1, group - 1), dtype=torch.int64, device=device), (0,)),
            "chunk_tokens": (torch.zeros(13, 12, dtype=torch.int64, device=device), (0, 1)),
            "chunk_sequences": (torch.zeros(13, dtype=torch.int64, device=device), (0,)),
            "chunk_links": (torch.zeros(13, dtype=torch.int64, device=device), (0,)),
            "link_chunks": (torch.zeros(8, dtype=torch.int64, device=device), (0,)),
            "link_positions": (torch.zeros(8, dtype=torch.int64, device=device), (0,)),
            "last_chunks": (torch.zeros(5, dtype=torch.int64, device=device), (0,)),
            "chunk_rows": (per_token, ()),
        }
        if field == "convolution_rows" or field in TOKEN_FIELDS:
            sizes, dtype = ((), torch.int32) if field in TOKEN_FIELDS else ((group,), torch.int64)
            with self.fake_mode:
                return self._new_step_input(name, field, torch.empty(tokens, *sizes, dtype=dtype, device=device))
        example, dynamic = examples[field]
        return self._new_step_input(name, field, self._fake(name, example, dynamic))

    def take_step_input(self, node: fx.Node, field: str) -> None:
        """Let a graph input that the model has receive a field of ``StepMetadata``."""
        node._rename(field)
        node.target = field
        node.meta["step_field"] = field
        self.step_inputs.append(field)

    def _new_step_input(self, name: str, field: str, example: Any) -> fx.Node:
        self.step_inputs.append(name)
        node = self.new_input(name, example)
        node.meta["step_field"] = field
        return node

    def add_cache(self, spec: CacheSpec | StateSpec) -> tuple[fx.Node, ...]:
        """New graph inputs: the key and the value cache ``[num_blocks, block_size, heads, dim]``, and in int8 the
        scales of both, ``[num_blocks, block_size, heads]``; or a state, ``[num_slots, *shape]``."""
        index = len(self.caches)
        self.caches.append(spec)
        device = value(self.placeholder(self.input_ids)).device
        nodes = []
        for part in spec.parts():
            name = f"{part.name}_{index}"
            if isinstance(spec, StateSpec):
                storage = torch.empty(11, *part.unit_shape, dtype=part.dtype, device=device)
                node = self._add_placeholder(name, storage, dynamic=(0,))
            else:
                heads, *dims = part.unit_shape
                storage = torch.empty(11, heads, 13, *dims, dtype=part.dtype, device=device)
                node = self._add_placeholder(name, storage.transpose(1, 2), dynamic=(0, 1))
            node.meta["cache_index"] = index
            nodes.append(node)
        return tuple(nodes)

    def number_caches(self) -> None:
        """Number the caches as the graph reads them first, so that those of one layer follow each other."""
        readers = [n for node in self.graph.nodes for n in node.all_input_nodes if cache_index(n) is not None]
        order = list(dict.fromkeys(cache_index(node) for node in readers))
        number = {old: new for new, old in enumerate(order)}
        for node in self.placeholders:
            if (index := cache_index(node)) is not None:
                # Not _rename: that never gives a name that another node has had.
                node.name = node.target = f"{node.name.removesuffix(str(index))}{number[index]}"
                node.meta["cache_index"] = number[index]
        self.caches = [self.caches[old] for old in order if old is not None]

    def lay_out_cache(
        self,
        index: int,
        block_size: int,
        key_dim: int,
        value_dim: int,
        num_kv_heads: int | None = None,
        *,
        scales_by_head: bool = False,
    ) -> None:
        """Let one token's heads lie together in a cache pair (``CacheSpec.by_token``), in blocks of a fixed size.

        ``num_kv_heads`` is given where it is to be another number than so far; for ``scales_by_head`` see
        ``CacheSpec``.
        """
        given = self.caches[index]
        assert isinstance(given, CacheSpec)
        heads = given.num_kv_heads if num_kv_heads is None else num_kv_heads
        spec = replace(
            given,
            by_token=True,
            num_kv_heads=heads,
            head_ranks=given.head_ranks if num_kv_heads is None else 1,
            key_dim=key_dim,
            value_dim=value_dim,
            scales_by_head=scales_by_head,
        )
        self.caches[index] = spec
        device = value(self.placeholder(self.input_ids)).device
        for part in spec.parts():
            node = self.placeholder(f"{part.name}_{index}")
            blocks = value(node).shape[0]
            with self.fake_mode:
                node.meta["example_value"] = torch.empty(
                    blocks, *part.block_shape(block_size), dtype=part.dtype, device=device
                )

    def _add_placeholder(self, name: str, example: torch.Tensor, dynamic: tuple[int, ...]) -> fx.Node:
        return self.new_input(name, self._fake(name, example, dynamic))

    def _fake(self, name: str, example: torch.Tensor, dynamic: tuple[int, ...]) -> torch.Tensor:
        """The fake of an input whose dims ``dynamic`` vary; ``example`` itself if it is one."""
        if isinstance(example, FakeTensor):
            return example
        if not dynamic:  # and no symbol for the number in a tensor without dims, which would have to be guarded
            return self.fake_mode.from_tensor(example, static_shapes=True)
        from torch._dynamo.source import LocalSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

        sizes = [DimDynamic.DYNAMIC if i in dynamic else DimDynamic.STATIC for i in range(example.dim())]
        context: StatelessSymbolicContext = StatelessSymbolicContext(dynamic_sizes=sizes)
        return self.fake_mode.from_tensor(example, source=LocalSource(name), symbolic_context=context)

    def new_input(self, name: str, example: Any) -> fx.Node:
        """A new graph input with a fake value, behind the others.

        Passes ask for ``add_constant``, ``step_input`` or ``add_cache``, so that linking knows what it receives.
        """
        from torch._dynamo.source import LocalSource

        with self.graph.inserting_after(self.placeholders[-1]):
            node = self.graph.placeholder(name)
        node.meta["example_value"] = example
        node._dynamo_source = LocalSource(name)  # type: ignore[attr-defined]
        return node

    def recompile(self) -> None:
        """Make ``module`` run the graph as it is now. Passes need not: it is done behind them.

        Raises:
            RuntimeError: the graph is not well-formed.
        """
        self.graph.lint()
        self.module.recompile()
