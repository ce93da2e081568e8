"""Link a compiled graph to its weights, caches and step metadata: the Program that the runtime drives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..passes import TracedGraph
from ..passes.evaluate import at_sizes
from ..passes.fx_nodes import shape, value
from ..passes.lower.pack_linears import PackedInputs
from ..runtime.ops.packed_linear import pack_weights
from ..runtime.program import CacheSpec, KVCache
from ..runtime.step import StepMetadata
from .report import CompileReport


class LinkedProgram:
    """A flat step of T tokens as a callable (see ``runtime.program.Program``).

    Args:
        traced: the rewritten graph that ``run`` was made from.
        run: function of the graph's placeholders, in order.
        report: how it was compiled.

    Attributes:
        copied_weights: the module's tensors that the program holds packed copies of; a change of their values
            does not reach it.
    """

    def __init__(
        self, traced: TracedGraph, run: Callable[..., Sequence[Any]], report: CompileReport | None = None
    ) -> None:
        self.report = report if report is not None else CompileReport("")
        self.caches: list[CacheSpec] = list(traced.caches)
        self.max_model_len = traced.max_positions
        self.restart_length: int | None = None
        self.vocab_size = int(shape(traced.output.args[0][0])[-1])  # type: ignore[index,arg-type]
        self.device: torch.device = value(traced.placeholder(traced.input_ids)).device
        self._run = run
        self._args: list[Any] = []
        self._fields: list[tuple[int, str]] = []
        self._sizes: list[int] = []
        self._cache_at: dict[str, int] = {}
        self._input_ids = self._position_ids = -1
        for i, node in enumerate(traced.placeholders):
            self._args.append(traced.constants.get(node.name))
            if node.name == traced.input_ids:
                self._input_ids = i
            elif node.name == traced.position_ids:
                self._position_ids = i
            elif node.name in traced.step_inputs:
                self._fields.append((i, node.name))
            elif node.name.startswith(("key_cache_", "value_cache_")):
                self._cache_at[node.name] = i
            elif node.name not in traced.constants:
                self._sizes.append(self._token_count_only(traced, node, i))
        self._gathers = "logits_rows" in traced.step_inputs
        self._bound = not self.caches
        at = {node.name: i for i, node in enumerate(traced.placeholders)}
        packed: list[PackedInputs] = traced.notes.get("packed", [])
        self._packable = [([at[w] for w in p.weights], [at[b] for b in p.biases]) for p in packed]
        self.copied_weights: list[torch.Tensor] = []

    @staticmethod
    def _token_count_only(traced: TracedGraph, node: Any, index: int) -> int:
        if at_sizes(value(node), {traced.token_symbol: 7}) != 7:
            raise ValueError(f"graph input {node.name} is neither a tensor nor the number of tokens")
        return index

    def bind(self, kv_cache: KVCache) -> None:
        """Give the program its caches, one (key, value) pair per entry of ``caches``.

        Raises:
            ValueError: their number, heads, sizes or dtype do not fit.
        """
        if len(kv_cache) != len(self.caches):
            raise ValueError(f"kv_cache has {len(kv_cache)} pairs; the program needs {len(self.caches)}")
        for i, ((key, val), spec) in enumerate(zip(kv_cache, self.caches, strict=True)):
            for kind, tensor, dim in (("key", key, spec.key_dim), ("value", val, spec.value_dim)):
                if tuple(tensor.shape[2:]) != (spec.num_kv_heads, dim) or tensor.dtype != spec.dtype:
                    raise ValueError(
                        f"kv_cache[{i}] {kind} is {tuple(tensor.shape)} {tensor.dtype}; "
                        f"give [num_blocks, block_size, {spec.num_kv_heads}, {dim}] {spec.dtype}"
                    )
                self._args[self._cache_at[f"{kind}_cache_{i}"]] = tensor
        self._bound = True

    def pack_weights(self, *, release: bool) -> int:
        """Lay the weights of packed linears out for the CPU's matrix kernels, one at a time.

        Args:
            release: free each source once it is packed, unless something else reads it. Only for weights that
                nobody else uses: the module cannot run by itself afterwards.

        Returns:
            bytes of packed weights.
        """
        size = 0
        for weights, biases in self._packable:
            sources = [self._args[i] for i in weights]
            size += sum(source.numel() * source.element_size() for source in sources)
            self._put(weights, pack_weights(sources))
            joined = [self._args[i] for i in biases] if len(biases) > 1 else []
            if joined:
                self._put(biases, torch.cat(joined))
            for source in sources:
                if release and not any(other is source for other in self._args):
                    source.data = source.new_empty(0)
            if not release:
                self.copied_weights += sources + joined
        self._packable = []
        return size

    def _put(self, inputs: Sequence[int], whole: torch.Tensor) -> None:
        """Hand ``whole`` to the first of the graph inputs and nothing to the others."""
        for i in inputs:
            self._args[i] = whole if i == inputs[0] else self._args[i].new_empty(0)

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Run one flat step: ``[1, T]`` ids and positions → ``[R, vocab_size]`` logits of the asked rows."""
        if not self._bound:
            raise RuntimeError("the program has no KV cache; call bind() first")
        args = list(self._args)
        args[self._input_ids] = input_ids
        if self._position_ids >= 0:
            args[self._position_ids] = position_ids
        for i, name in self._fields:
            args[i] = getattr(step, name)
        for i in self._sizes:
            args[i] = input_ids.shape[1]
        with torch.no_grad():
            logits: torch.Tensor = self._run(*args)[0][0]
        # Without the pass that gathers the asked rows in front of the head they are taken from all.
        return logits if self._gathers else logits[step.logits_rows]
