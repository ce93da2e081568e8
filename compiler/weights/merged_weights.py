"""The tensors behind merged graph inputs: the module's parameters become views of them, so that memory stays.

``passes.rewrite.merge_linears`` notes which inputs are the rows of a merged one. The weights move when a graph is
linked (:func:`link_merged_weights`), one merged tensor at a time, each source being freed before the next is copied.
A parameter keeps its identity, values, shape and strides; only its storage is another one, which it shares with its
neighbors. Parameters that already lie one after the other in one storage stay where they are: programs of one
module share its merged weights, and merging again changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...passes import TracedGraph
from ...runtime.memory import advise_huge_pages
from ...runtime.ops.linear.stored_weight import StoredWeight
from .file_pages import FilePages
from .weight_guard import Place, place_of, weights_moved


def link_merged_weights(traced: TracedGraph, *, stored: bool = False) -> None:
    """Put the tensors of merged inputs among the constants of ``traced``, moving parameters where that is needed.

    Those of stored weights only if ``stored``: nothing computes with these before they are packed, and on a CPU they
    are merged then.

    No other thread may run the module meanwhile.
    """
    merge_inputs(traced.notes.merged, traced.constants, stored=stored)


def merge_inputs(
    merged: Mapping[str, Sequence[str]], constants: dict[str, torch.Tensor], *, stored: bool = False
) -> None:
    """Likewise for ``constants`` without a graph: input → the inputs that are its rows."""
    wanted = {
        name: sources
        for name, sources in merged.items()
        if name not in constants and (stored or not isinstance(constants[sources[0]], StoredWeight))
    }
    pages = FilePages(constants[source] for sources in wanted.values() for source in sources)
    for name, sources in wanted.items():
        constants[name] = merge_rows([constants[source] for source in sources], pages)


def merge_rows(tensors: Sequence[torch.Tensor], pages: FilePages | None = None) -> torch.Tensor:
    """One tensor whose rows are those of ``tensors``, one after the other; they become views of it.

    Args:
        tensors: contiguous, of one dtype and device, equal in all sizes but the first.
        pages: what of their memory may be dropped, for tensors mapped from a file.

    Returns:
        ``[sum of first sizes, ...]``, contiguous. When the tensors lie in one storage in this order, it is a view
        of that.
    """
    first = tensors[0]
    if isinstance(first, StoredWeight):
        return _merge_stored([tensor for tensor in tensors if isinstance(tensor, StoredWeight)], pages)
    sizes = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
    # A tensor made in inference mode takes data of its own kind only.
    with torch.inference_mode(first.is_inference()), torch.no_grad():
        if _adjacent(tensors):
            return first.data.as_strided(sizes, first.stride(), first.storage_offset())
        whole = torch.empty(sizes, dtype=first.dtype, device=first.device)
        advise_huge_pages(whole)
        moves: dict[int, tuple[Place, Place]] = {}
        start = 0
        for tensor in tensors:
            before = place_of(tensor)
            rows = whole.narrow(0, start, tensor.shape[0])
            rows.copy_(tensor)
            if pages is not None:
                pages.drop(before[0], rows.numel() * rows.element_size())
            tensor.data = rows
            moves[id(tensor)] = (before, place_of(tensor))
            start += tensor.shape[0]
    weights_moved(moves)
    return whole


def _merge_stored(weights: Sequence[StoredWeight], pages: FilePages | None) -> StoredWeight:
    """The same of stored weights, whose codes, scales and zeros become rows of merged ones."""
    parts = [[weight.codes for weight in weights], [weight.scales for weight in weights]]
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    if all(map(_adjacent, [*parts, zeros] if zeros else parts)):  # merged for another graph already
        return weights[0].each(lambda part: _rows_from(part, sum(len(rows) for rows in parts[0])))
    whole = torch.cat(list(weights))
    assert isinstance(whole, StoredWeight)
    start = 0
    for weight in weights:
        if pages is not None:
            pages.drop_tensors([weight])
        rows = slice(start, start + weight.codes.shape[0])
        weight.codes, weight.scales = whole.codes[rows], whole.scales[rows]
        weight.zeros = None if whole.zeros is None else whole.zeros[rows]
        start = rows.stop
    return whole


def _rows_from(first: torch.Tensor, count: int) -> torch.Tensor:
    """So many rows of the storage in which ``first`` is the first ones."""
    return first.as_strided((count, *first.shape[1:]), first.stride(), first.storage_offset())


def _adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    """True if the tensors lie one after the other in one storage."""
    storage, offset = tensors[0].untyped_storage().data_ptr(), tensors[0].storage_offset()
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != storage or tensor.storage_offset() != offset:
            return False
        offset += tensor.numel()
    return True


class AddedArguments:
    """Arguments that passes have added to a graph's own, with a check that parameters still are the rows of merged
    tensors.

    For graphs that receive the module's parameters at every call (``torch.compile``).

    Args:
        traced: a linked graph.
        own: how many inputs it had before; those that were added come after them.

    Attributes:
        tensors: of the added inputs, in order: merged weights, masks, tables.
    """

    def __init__(self, traced: TracedGraph, own: int) -> None:
        nodes = traced.placeholders
        at = {node.name: i for i, node in enumerate(nodes)}
        self.tensors = [traced.constants[node.name] for node in nodes[own:]]
        self._expected: list[tuple[int, int, str]] = []
        for name, sources in traced.notes.merged.items():
            whole = traced.constants[name]
            address = whole.data_ptr()
            for source in sources:
                tensor = traced.constants[source]
                self._expected.append((at[source], address, _parameter_name(nodes[at[source]])))
                address += tensor.numel() * tensor.element_size()

    def check(self, arguments: Sequence[Any]) -> None:
        """Compare the addresses of the parameters among ``arguments``, those of the graph before merging.

        Raises:
            RuntimeError: a parameter is no longer where it was merged.
        """
        for i, address, name in self._expected:
            if arguments[i].data_ptr() != address:
                raise RuntimeError(
                    f"{name!r} was replaced or moved after the model was compiled (.to(), "
                    "load_state_dict(assign=True), an adapter); recompile it (torch.compiler.reset())"
                )


def _parameter_name(node: Any) -> str:
    """The qualified name of the parameter behind a graph input, or the input's own name."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    spelled = name() if callable(name) else name
    keys = re.findall(r"\['([^']*)'\]", spelled or "")
    return ".".join(keys[1:]) if len(keys) > 1 else node.name
