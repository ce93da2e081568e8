"""Tensor layouts and length lists of the `npu::` attention operators (op-plugin, npu_fused_infer_attention_score).

Letters: B batch, S sequence, T tokens of all sequences, N query heads, KN key/value heads, D head size, H = N·D.
Layout names give the order of the dims; ``X_Y`` takes queries in X and returns Y.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

# input_layout -> (layout of query, key and value; layout of the output)
_LAYOUTS = {
    "BSH": ("BSH", "BSH"),
    "BSND": ("BSND", "BSND"),
    "BNSD": ("BNSD", "BNSD"),
    "TND": ("TND", "TND"),
    "NTD": ("NTD", "NTD"),
    "BNSD_BSND": ("BNSD", "BSND"),
    "BSH_BNSD": ("BSH", "BNSD"),
    "BSND_BNSD": ("BSND", "BNSD"),
    "BSH_NBSD": ("BSH", "NBSD"),
    "BSND_NBSD": ("BSND", "NBSD"),
    "BNSD_NBSD": ("BNSD", "NBSD"),
    "TND_NTD": ("TND", "NTD"),
    "NTD_TND": ("NTD", "TND"),
}


@dataclass(frozen=True)
class Layout:
    """A parsed ``input_layout``.

    Attributes:
        name: as given.
        inputs: layout of query, key and value.
        output: layout of the result.
    """

    name: str
    inputs: str
    output: str

    def single(self, query: torch.Tensor) -> bool:
        """True where every sequence has one query by its shape: the operators then take their decode kernel."""
        return not self.packed and self.batch_length_heads(query, 1)[1] == 1

    @property
    def packed(self) -> bool:
        """True where sequences lie one after the other on a token axis, without a batch axis."""
        return "T" in self.inputs

    def heads_first(self, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        """A view of ``tensor`` as ``[B, N, S, D]``, or ``[N, T, D]`` in a packed layout."""
        if self.inputs == "BSH":
            return tensor.unflatten(2, (heads, -1)).transpose(1, 2)
        if self.inputs == "BSND":
            return tensor.transpose(1, 2)
        if self.inputs == "TND":
            return tensor.transpose(0, 1)
        return tensor

    def arranged(self, output: torch.Tensor) -> torch.Tensor:
        """``output`` (``[B, N, S, D]``, packed: ``[N, T, D]``) in the output layout, contiguous."""
        if self.output == "BSH":
            return output.transpose(1, 2).flatten(2).contiguous()
        if self.output == "BSND":
            return output.transpose(1, 2).contiguous()
        if self.output in ("NBSD", "TND"):
            return output.transpose(0, 1).contiguous()
        return output.contiguous()

    def output_shape(self, query: torch.Tensor, heads: int, value_dim: int) -> list[int]:
        """Shape of the result for this ``query`` and head size of ``value``."""
        if self.packed:
            tokens, heads = (query.shape[0], query.shape[1])[:: 1 if self.inputs == "TND" else -1]
            return [tokens, heads, value_dim] if self.output == "TND" else [heads, tokens, value_dim]
        batch, length, heads = self.batch_length_heads(query, heads)
        return {
            "BSH": [batch, length, heads * value_dim],
            "BSND": [batch, length, heads, value_dim],
            "BNSD": [batch, heads, length, value_dim],
            "NBSD": [heads, batch, length, value_dim],
        }[self.output]

    def batch_length_heads(self, query: torch.Tensor, heads: int) -> tuple[int, int, int]:
        """Batch, sequence length and query heads in a layout with a batch axis."""
        if self.inputs == "BSH":
            return query.shape[0], query.shape[1], heads
        if self.inputs == "BSND":
            return query.shape[0], query.shape[1], query.shape[2]
        return query.shape[0], query.shape[2], query.shape[1]

    def lse_shape(self, query: torch.Tensor, heads: int) -> list[int]:
        """Shape of the log-sum-exp: ``[T, N, 1]`` for packed layouts, else ``[B, N, S, 1]``."""
        if self.packed:
            tokens, heads = (query.shape[0], query.shape[1])[:: 1 if self.inputs == "TND" else -1]
            return [tokens, heads, 1]
        batch, length, heads = self.batch_length_heads(query, heads)
        return [batch, heads, length, 1]


def parse_layout(name: str, query: torch.Tensor) -> Layout:
    """Look up ``input_layout``; raise ``ValueError`` for an unknown one or a query of another rank."""
    if name == "NSD":
        raise NotImplementedError("input_layout 'NSD' has no CPU kernel; use BNSD with a batch of 1")
    if name not in _LAYOUTS:
        raise ValueError(f"input_layout is {name!r}; it must be one of {', '.join(_LAYOUTS)}")
    inputs, output = _LAYOUTS[name]
    if query.dim() != len(inputs):
        raise ValueError(f"query has shape {tuple(query.shape)}; input_layout {name!r} takes {len(inputs)} dims")
    return Layout(name, inputs, output)


def batch_lengths(name: str, given: Sequence[int] | None, batch: int, longest: int) -> list[int]:
    """Length of each sequence from a per-sequence list: None for the full length, one entry for all, else B or more.

    Raises:
        ValueError: a list of another size, or a length outside ``[0, longest]``.
    """
    if given is None:
        return [longest] * batch
    if len(given) != 1 and len(given) < batch:
        raise ValueError(f"{name} has {len(given)} entries for a batch of {batch}; give one, or one per sequence")
    lengths = [int(given[0])] * batch if len(given) == 1 else [int(length) for length in given[:batch]]
    for length in lengths:
        if not 0 <= length <= longest:
            raise ValueError(f"{name} is {lengths}; each length must be between 0 and {longest}")
    return lengths


def packed_bounds(name: str, given: Sequence[int] | None, tokens: int) -> list[int]:
    """``[0, end of sequence 0, end of sequence 1, …]`` from a cumulative list.

    Raises:
        ValueError: no list, a decreasing one, or one that does not end at ``tokens`` (a device leaves the rest of
            the result undefined).
    """
    if not given:
        raise ValueError(f"{name} is {given}; layouts with a token axis need the cumulative lengths of the sequences")
    bounds = [0, *(int(end) for end in given)]
    if any(end < start for start, end in pairwise(bounds)):
        raise ValueError(f"{name} is {bounds[1:]}; cumulative lengths never decrease and start at 0 or more")
    if bounds[-1] != tokens:
        raise ValueError(
            f"{name} ends at {bounds[-1]}, but there are {tokens} tokens; without a block table these are "
            "cumulative lengths, and the last one is the number of tokens"
        )
    return bounds
