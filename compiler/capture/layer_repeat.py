"""Compiles a few decoder layers and repeats the last of them, so that compile time does not grow with depth.

Layers of transformers' models that are equal as modules (see ``layer_kinds``) are traced and rewritten once. The
model is captured with the first ``kept`` layers only; in its rewritten graph the parts of the layers are compared
node by node, and the last part is repeated over the parameters of the other layers. If two compiled layers differ in
the graph, or the logits of the unrolled graph differ from the whole model's, everything is recompiled with all
layers.

Custom code may treat layers differently by index, such as "the upper half looks back over 4096 tokens", which no
compared sequence would show. So models with such code are compiled with all their layers.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...passes import TracedGraph
from ...passes.graph.cut import Cut
from ...passes.graph.fx_nodes import cache_index, is_pure, value
from ...passes.graph.notes import Part
from ...passes.graph.provenance import scopes
from ...passes.sharding.slices import part_of
from ...runtime.ops.linear.stored_weight import StoredWeight
from ...runtime.program import is_cache_input
from ..live_module.describer import CannotIdentify
from ..weights.tensor_contents import module_tensors
from .layer_kinds import find_decoder_layers, layer_kinds
from .model_facts import configs

log = logging.getLogger(__name__)

LEAST_SAVED = 4
"""Layers that have to be spared for it to be worth while."""

_META = torch.device("meta")
"""Of weights that are not loaded."""
_KNOWN_CODE = ("torch.", "transformers.", __package__.split(".")[0] + ".")
"""Packages whose modules use a layer's index only to address its cache; tests read all of transformers' layers."""


class CannotRepeat(Exception):
    """The layers are not equal, or may not be. The message says where."""


@dataclass(frozen=True)
class LayerRepeat:
    """The layers of a model that are compiled, and those that are copies of them.

    Attributes:
        model: it, with all its layers.
        path: qualified name of the module list that holds them.
        total: how many there are.
        kept: how many of the first are compiled; their last ``2 * period + 2`` and all that follow are
            periodic.
        period: layers after which the same kinds of layer follow.
    """

    model: nn.Module
    path: str
    total: int
    kept: int
    period: int

    @classmethod
    def of(cls, model: nn.Module) -> LayerRepeat | None:
        """The repeat of a model whose decoder layers are mostly alike; None for any other."""
        path, layers = find_decoder_layers(model)
        total = len(layers)
        if not path or total <= LEAST_SAVED:
            return None
        try:
            _check_code(model)
            periods = _periods(layer_kinds(model, layers))
        except (CannotIdentify, CannotRepeat) as error:
            log.info("compiling all %d layers of %s: %s", total, type(model).__name__, error)
            return None
        return None if periods is None else cls(model, path, total, *periods)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Leave the model with the kept layers for a while."""
        parent_path, _, name = self.path.rpartition(".")
        parent = self.model.get_submodule(parent_path)
        whole = getattr(parent, name)
        short = type(whole)(list(whole)[: self.kept])
        short.train(whole.training)
        setattr(parent, name, short)
        try:
            yield
        finally:
            setattr(parent, name, whole)

    def inputs_of_layers(self, traced: TracedGraph) -> frozenset[str]:
        """Names of the inputs of a captured graph that receive tensors of the layers."""
        inner = self._inner_names()
        return frozenset(name for name, t in traced.constants.items() if id(t) in inner)

    def inputs_not_loaded(self, traced: TracedGraph) -> frozenset[str]:
        """Names of the inputs of a graph of all layers that receive what is not loaded in one or more of them."""
        inner = self._inner_names()
        absent = {inner[id(t)] for t in traced.constants.values() if id(t) in inner and t.is_meta}
        return frozenset(name for name, t in traced.constants.items() if inner.get(id(t)) in absent)

    def _inner_names(self) -> dict[int, str]:
        """The name within its layer of each tensor of the layers, by its id."""
        layer = re.compile(rf"{re.escape(self.path)}\.\d+\.(.*)")
        return {id(t): m[1] for name, t in module_tensors(self.model).items() if (m := layer.fullmatch(name))}

    def unroll(self, traced: TracedGraph) -> TracedGraph:
        """The rewritten graph of the kept layers, with the periodic part repeated up to all layers.

        Raises:
            CannotRepeat: the compiled layers are not alike in it.
        """
        unrolled = _Unrolling(self, traced.copy()).run()
        self.check_unrolled(unrolled)
        return unrolled

    def check_unrolled(self, traced: TracedGraph) -> None:
        """Compare each period of a graph of all layers with the one before it, node by node.

        Raises:
            CannotRepeat: one does something else.
        """
        whole = _Unrolling(replace(self, kept=self.total), traced.copy(), self.kept)
        for count in range((self.total - self.kept) // self.period + 1):
            whole.compare_periods(count)


def _check_code(model: nn.Module) -> None:
    """Raise :class:`CannotRepeat` if a module or a registered attention is not transformers' or PyTorch's."""
    for config in configs(model):
        chosen = getattr(config, "_attn_implementation", None)
        if isinstance(chosen, str) and not _is_known(ALL_ATTENTION_FUNCTIONS.get(chosen, None)):
            raise CannotRepeat(f"attn_implementation={chosen!r} is not transformers' code")
    for name, module in model.named_modules():
        hooked = module._forward_hooks or module._forward_pre_hooks
        if hooked or not _is_known(vars(module).get("forward", type(module).forward)):
            raise CannotRepeat(f"{name or type(module).__name__} runs code other than transformers'")


def _is_known(function: Any) -> bool:
    return function is None or getattr(inspect.unwrap(function), "__module__", "").startswith(_KNOWN_CODE)


def _periods(kinds: Sequence[Hashable]) -> tuple[int, int] | None:
    """The number of layers to compile and the period in which the last of them repeat; None where nothing is won."""
    total, best = len(kinds), None
    for period in range(1, total // 2):
        first = total - period  # of the layers that have one of their kind a period later
        while first > 0 and kinds[first - 1] == kinds[first - 1 + period]:
            first -= 1
        kept = first + 2 * period + 2  # what comes before the first period is read by it, not by the second
        kept += (total - kept) % period
        if best is None or kept < best[0]:
            best = kept, period
    return None if best is None or total - best[0] < LEAST_SAVED else best


class _Unrolling:
    """One unrolling of one graph, which is changed; or, with ``compiled`` layers, one that was unrolled from them.

    What layers in front of their last two periods compute, all others may read.
    """

    def __init__(self, repeat: LayerRepeat, traced: TracedGraph, compiled: int | None = None) -> None:
        self.repeat, self.traced = repeat, traced
        self.tensors = module_tensors(repeat.model)
        self.names = {id(tensor): name for name, tensor in self.tensors.items()}
        self.layer = re.compile(rf"({re.escape(repeat.path)}\.)(\d+)(\.|$)")
        self.merged: dict[str, tuple[str, ...]] = dict(traced.notes.merged)
        self.inputs = {node.name: node for node in traced.placeholders}
        self.wholes = traced.constants | {name: part.whole for name, part in traced.notes.parts.items()}
        self.input_of = {
            (self.names[id(t)], self._cut(name)): name for name, t in self.wholes.items() if id(t) in self.names
        }
        self.merged_of = {sources: name for name, sources in self.merged.items()}
        self._move_shared_ahead()
        self.calls = [n for n in traced.graph.nodes if n.op in ("call_function", "call_method")]
        self.at = {node: i for i, node in enumerate(self.calls)}
        marks = self._last_reads()
        if len(marks) != repeat.kept:
            raise CannotRepeat(f"{len(marks)} of {repeat.kept} layers read a cache")
        self.shared = marks[(compiled or repeat.kept) - 1 - 2 * repeat.period]
        self.marks = marks[:: -repeat.period]
        self.caches = len(traced.caches) - self._caches_before(self.marks[1])
        self.compare_periods(0)

    def compare_periods(self, count: int) -> None:
        """Compare the two periods in front of so many of the last.

        Raises:
            CannotRepeat: they differ.
        """
        self.end, self.middle, self.start = self.marks[count : count + 3]
        self.length = self.end - self.middle
        if self.middle - self.start != self.length:
            raise CannotRepeat(
                f"layers of {self.middle - self.start} and of {self.length} operators follow each other"
            )
        for i in range(1, self.length + 1):
            self._compare(self.calls[self.start + i], self.calls[self.middle + i])

    def run(self) -> TracedGraph:
        specs = self.traced.caches[-2 * self.caches :]
        if self.caches == 0 or specs[: self.caches] != specs[self.caches :]:
            raise CannotRepeat("their caches differ")
        repeats = (self.repeat.total - self.repeat.kept) // self.repeat.period
        unit = self.calls[self.middle + 1 : self.end + 1]
        tail = self.calls[self.end + 1 :]
        for node in [*tail, self.traced.output]:
            self._check_tail(node)
        newest: dict[fx.Node, fx.Node] = {}  # node of the last compiled period → that of the last period so far
        behind = self.calls[self.end]
        for count in range(1, repeats + 1):
            copies: dict[fx.Node, fx.Node] = {}

            shifted = functools.partial(self._shifted, count, copies, newest)
            self.traced.caches += specs[: self.caches]
            for node in unit:
                with self.traced.graph.inserting_after(behind):
                    behind = copies[node] = self.traced.graph.node_copy(node, shifted)
                self._move_scopes(behind, count)
            newest = copies

        def last(old: fx.Node) -> fx.Node:
            return self._input(old, repeats) if old.op == "placeholder" else newest.get(old, old)

        for node in [*tail, self.traced.output]:
            node.args = fx.map_arg(node.args, last)
            node.kwargs = fx.map_arg(node.kwargs, last)
            self._move_scopes(node, repeats)
        self._fold(repeats)
        self.traced.notes.merged = self.merged
        self.traced.recompile()
        return self.traced

    def _fold(self, repeats: int) -> None:
        """Guard the numbers that passes read off tensors of the last period (masks, scales), and with them those of
        the layers that were left out: the copies have the same."""
        notes = self.traced.notes
        first = self.repeat.kept - self.repeat.period
        for name in list(notes.folded):
            match = self.layer.match(self.names.get(id(self.wholes[name]), ""))
            if match is None or int(match[2]) < first:
                continue
            for periods in range(1, repeats + 1):
                other = self._input(self.inputs[name], periods).name
                if self.traced.constants[other].is_meta:
                    raise CannotRepeat(f"the numbers of {name} stand in the graph, and {other} is not loaded")
                if not torch.equal(self.traced.constants[name], self.traced.constants[other]):
                    raise CannotRepeat(f"{other} does not hold the numbers of {name}, which stand in the graph")
                notes.fold([other])

    def _move_shared_ahead(self) -> None:
        """Put what follows from the step alone, such as a rotary table, in front of the layers: the first layer that
        reads it may be any."""
        inputs = self.traced.placeholders
        shared = {n for n in inputs if not self._is_of_a_layer(n.name) and n.name != self.traced.input_ids}
        place = inputs[-1]
        for node in list(self.traced.graph.nodes):
            pure = node.op == "call_function" and is_pure(node.target)
            if pure and all(n in shared for n in node.all_input_nodes):
                shared.add(node)
                place.append(node)
                place = node

    def _is_of_a_layer(self, name: str) -> bool:
        if name in self.merged:
            return any(map(self._is_of_a_layer, self.merged[name]))
        tensor = self.wholes.get(name)
        return is_cache_input(name) or self.layer.match(self.names.get(id(tensor), "")) is not None

    def _shifted(
        self, periods: int, copies: dict[fx.Node, fx.Node], newest: dict[fx.Node, fx.Node], old: fx.Node
    ) -> fx.Node:
        """The node that a copy reads, made so many periods after the one that reads ``old``."""
        if old.op == "placeholder":
            return self._input(old, periods)
        if self.at[old] > self.middle:
            return copies[old]
        if self.at[old] > self.start:  # of the period before
            same = self.calls[self.at[old] + self.length]
            return newest.get(same, same)
        return old

    def _last_reads(self) -> list[int]:
        """Of each layer, in order, the last call that reads a cache: its attention, or what goes on from a state."""
        last: dict[str, int] = {}
        for i, call in enumerate(self.calls):
            if any(cache_index(node) is not None for node in call.all_input_nodes):
                entries = [self.layer.match(scope.path + ".") for scope in scopes(call)]
                names = [match[2] for match in entries if match]
                if not names:
                    raise CannotRepeat(f"{call.name} reads a cache outside of all layers")
                last[names[0]] = i
        return list(last.values())

    def _caches_before(self, mark: int) -> int:
        """Number of caches that the calls up to this one use."""
        read = (node for call in self.calls[: mark + 1] for node in call.all_input_nodes)
        return len({cache_index(node) for node in read} - {None})

    # Comparing two periods

    def _compare(self, a: fx.Node, b: fx.Node) -> None:
        """Let ``b`` do in its period what ``a`` does in the one before."""
        if (a.op, a.target) != (b.op, b.target) or not self._alike((a.args, a.kwargs), (b.args, b.kwargs)):
            raise CannotRepeat(f"{a.format_node()} and {b.format_node()} differ")

    def _alike(self, a: Any, b: Any) -> bool:
        if isinstance(a, fx.Node) or isinstance(b, fx.Node):
            return isinstance(a, fx.Node) and isinstance(b, fx.Node) and self._corresponds(a, b)
        if isinstance(a, (list, tuple)):
            same = type(a) is type(b) and len(a) == len(b)
            return same and all(self._alike(x, y) for x, y in zip(a, b, strict=True))
        if isinstance(a, Mapping):
            same = isinstance(b, Mapping) and list(a) == list(b)
            return same and all(self._alike(a[key], b[key]) for key in a)
        if isinstance(a, slice):
            return isinstance(b, slice) and self._alike((a.start, a.stop, a.step), (b.start, b.stop, b.step))
        return type(a) is type(b) and bool(a == b)

    def _corresponds(self, a: fx.Node, b: fx.Node) -> bool:
        if a.op == "placeholder" or b.op == "placeholder":
            return a.op == b.op and (self._shifted_name(a.name, 1) == b.name or self._equal_tables(a, b))
        if self.at[b] > self.start:
            return self.at[b] - self.at[a] == self.length
        return a is b and self.at[b] <= self.shared

    def _equal_tables(self, a: fx.Node, b: fx.Node) -> bool:
        """True if two inputs receive tensors that passes made, and these are equal."""
        x, y = (self.traced.constants.get(node.name) for node in (a, b))
        if x is None or y is None or {id(x), id(y)} & set(self.names) or self._cut(a.name) != self._cut(b.name):
            return False
        return _form(x) == _form(y) and torch.equal(x, y)

    # Inputs

    def _shifted_name(self, name: str, periods: int) -> str:
        """Name of the input that stands for this one so many periods later; "" where there is none yet."""
        if is_cache_input(name):
            index = self._cache_index(name)
            return f"{name.removesuffix(str(index))}{index + periods * self.caches}"
        if name in self.merged:
            sources = tuple(self._shifted_name(source, periods) for source in self.merged[name])
            return self.merged_of.get(sources, "")
        tensor = self.wholes.get(name)
        if tensor is None or id(tensor) not in self.names:
            return name
        return self.input_of.get((self._shifted_path(self.names[id(tensor)], periods), self._cut(name)), "")

    def _cut(self, name: str) -> Cut | None:
        """Of an input that receives a part of a weight, which one."""
        part = self.traced.notes.parts.get(name)
        return None if part is None else part.cut

    def _cache_index(self, name: str) -> int:
        index = cache_index(self.inputs[name])
        assert index is not None, name
        return index

    def _shifted_path(self, name: str, periods: int) -> str:
        """The qualified name of what stands in the layer so many periods later."""
        step = periods * self.repeat.period
        return self.layer.sub(lambda m: f"{m[1]}{int(m[2]) + step}{m[3]}", name, count=1)

    def _input(self, old: fx.Node, periods: int) -> fx.Node:
        """The input that stands for ``old`` so many periods later; made where it is not there yet."""
        name = self._shifted_name(old.name, periods)
        return self.inputs[name] if name in self.inputs else self._new_input(old, periods)

    def _new_input(self, old: fx.Node, periods: int) -> fx.Node:
        if old.name in self.merged:
            sources = tuple(self._input(self.inputs[s], periods).name for s in self.merged[old.name])
            name = f"merged_{sources[0]}"
            self.merged[name], self.merged_of[sources] = sources, name
        elif is_cache_input(old.name):
            name = self._shifted_name(old.name, periods)
        else:
            weight = self._shifted_path(self.names[id(self.wholes[old.name])], periods)
            source, target = self.wholes[old.name], self.tensors.get(weight)
            if target is None or _form(source) != _form(target) or target.device not in (source.device, _META):
                raise CannotRepeat(f"{weight} is not like that of the layer that is repeated")
            name = re.sub(r"\W+", "_", f"weight_{weight}").lower()  # as FX would
            cut = self._cut(old.name)
            if name in self.inputs:  # another part of it, or all
                name = f"{name}_{len(self.inputs)}"
            self.traced.constants[name] = self.wholes[name] = target
            if cut is not None:
                self.traced.constants[name] = part_of(target, cut, self.traced.rank)
                self.traced.notes.parts[name] = Part(target, cut)
            self.input_of[weight, cut] = name
        with self.traced.fake_mode:
            example = value(old).detach().clone()  # one object twice would be traced as one input
        node = self.inputs[name] = self.traced.new_input(name, example)
        if node.name != name:
            raise CannotRepeat(f"another node is called {name}")
        if is_cache_input(old.name):
            node.meta["cache_index"] = self._cache_index(old.name) + periods * self.caches
        return node

    # The rest

    def _check_tail(self, node: fx.Node) -> None:
        """Refuse what reads a period that will no longer be one of the last two."""
        for n in node.all_input_nodes:
            if n.op != "placeholder" and self.start < self.at[n] <= self.middle:
                raise CannotRepeat(f"{node.name} reads {n.name}, of a layer that is not the last")

    def _move_scopes(self, node: fx.Node, periods: int) -> None:
        """Say that a node comes from the layers so many periods later."""
        stack = node.meta.get("nn_module_stack")
        if not stack:
            return
        node.meta["nn_module_stack"] = {
            key: (self._shifted_path(str(path), periods), kind) for key, (path, kind) in stack.items()
        }


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    stored = (tensor.form, tensor.transposed) if isinstance(tensor, StoredWeight) else None
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), type(tensor), stored
