"""`pagoda::linear_recurrence` in chunks, in plain ATen operators with static shapes, for Ascend.

Within a chunk, with decays d_i, the running sum g of their logarithms, and S the state in front of it (Yang et al.
2024, *Parallelizing Linear Transformers with the Delta Rule*; Dao & Gu 2024 without beta)::

    A[i, j]  = beta_i · (k_i · k_j) · exp(g_i - g_j)           # j < i
    (I + A) U = beta · (V - exp(g) K Sᵀ)                       # or U = V, where there is no beta
    o_i      = S exp(g_i) q_i + Σ_{j <= i} (q_i · k_j) exp(g_i - g_j) u_j
    S'       = S exp(g_last) + Σ_j u_j (exp(g_last - g_j) k_j)ᵀ

No exponent is positive, and each g_i - g_j is summed by itself: a token that forgets everything has a sum in which
the difference of two later ones would drown. S' is linear in S, so chunks pass states on as matrices that are
multiplied, by doubling: as many rounds as ``state_tables.MOST_CHUNKED_TOKENS`` need, over links alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...state_tables import MOST_CHUNKED_TOKENS
from .gathered_states import states_before
from .state_slots import compute_dtype

aten = torch.ops.aten

CHUNK = 64
"""Most tokens of a chunk."""
CHANNEL_CHUNK = 16
"""The same where each key channel decays by itself: there are as many products as channels, for each pair of
tokens."""


class Chunks(NamedTuple):
    """The tables of ``state_tables.chunk_tables``, in its order of names."""

    tokens: torch.Tensor
    sequences: torch.Tensor
    links: torch.Tensor
    rows: torch.Tensor
    link_chunks: torch.Tensor
    link_positions: torch.Tensor
    last: torch.Tensor

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """``[1, T, ...]`` as ``[C, L, ...]``; what is behind a chunk's last token is that of token 0."""
        rows = x.reshape(-1, *x.shape[2:]).index_select(0, self.tokens.clamp(min=0).reshape(-1))
        return rows.reshape(*self.tokens.shape, *x.shape[2:])

    def present(self, x: torch.Tensor) -> torch.Tensor:
        """``[C, L, ...]`` with zeros behind each chunk's last token."""
        return x.masked_fill((self.tokens < 0).view(*self.tokens.shape, *[1] * (x.dim() - 2)), 0.0)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """``[C, L, ...]`` as ``[1, T, ...]``."""
        return x.reshape(-1, *x.shape[2:]).index_select(0, self.rows)[None]


def chunked_recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float,
    l2norm_eps: float | None,
    state: torch.Tensor,
    state_read: torch.Tensor,
    *tables: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of ``pagoda::linear_recurrence`` that leaves the pool of states alone.

    Args:
        query, key, value, log_decay, beta, scale, l2norm_eps, state, state_read: of the operator.
        tables: of ``state_tables.chunk_tables`` for chunks of ``chunk_width(log_decay)``, in its order.

    Returns:
        ``[1, T, Hv, P]`` in the dtype of ``value``, and the states behind the step's tokens, ``[S, Hv, P, N]`` in
        that of ``state``.
    """
    chunks, wide = Chunks(*tables), compute_dtype(value)
    groups = value.shape[2] // key.shape[2]
    q = normalized(chunks.of(query).to(wide), l2norm_eps) * scale
    k = chunks.present(normalized(chunks.of(key).to(wide), l2norm_eps))
    q, k = (_repeated(x.transpose(1, 2), groups) for x in (q, k))  # [C, Hv, L, N]
    v = chunks.of(value).to(wide).transpose(1, 2)  # [C, Hv, L, P]
    steps = _log_decays(chunks, log_decay, v.dtype)
    between = _sums_between(steps)
    start_decay = aten.exp(aten.cumsum(steps, 2))  # from the chunk's start, [C, Hv, L, 1], or N for 1
    last = start_decay[:, :, -1:]
    keys = k * aten.exp(between[:, :, -1])  # as they stand in the state behind the chunk
    before = states_before(state, state_read).to(wide)
    if beta is None:
        (reads,) = _decayed_products((q,), k, between)
        start = _handed_on(chunks, before, last, product(v.mT, keys))
        written = v
    else:
        b = chunks.of(beta).to(wide).transpose(1, 2)[..., None]  # [C, Hv, L, 1]
        reads, seen = _decayed_products((q, k), k, between)
        solved = product(_inverse(seen * b, chunk_width(log_decay)), aten.cat([v * b, k * start_decay * b], -1))
        written, reading = solved[..., : v.shape[3]], solved[..., v.shape[3] :]
        start = _handed_on_as_matrices(chunks, before, last, keys, written, reading)
        written = written - product(reading, start.mT)
    result = product(q * start_decay, start.mT) + product(reads, written)

    ends = [x.index_select(0, chunks.last) for x in (start, last, written, keys)]
    after = ends[0] * ends[1] + product(ends[2].mT, ends[3])
    return chunks.to_tokens(result.transpose(1, 2)).to(value.dtype), after.to(state.dtype)


def chunk_width(log_decay: torch.Tensor) -> int:
    """Most tokens of the chunks that :func:`chunked_recurrence` takes."""
    return CHANNEL_CHUNK if log_decay.dim() == 4 else CHUNK


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Matrix products over two leading dims, which both have."""
    rows, inner, columns = a.shape[2], a.shape[3], b.shape[3]
    flat = aten.bmm(a.reshape(-1, rows, inner), b.reshape(-1, inner, columns))
    return flat.reshape(*a.shape[:2], rows, columns)


def doubled(
    decay: torch.Tensor, added: torch.Tensor, position: torch.Tensor, dim: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays and sums of everything up to each member of a row, from those of each by itself.

    A member takes a state S to ``S * decay + added``; so do the members up to one of them, with what is returned.

    Args:
        decay: of each member; broadcasts to ``added``.
        added: likewise.
        position: number of members in front of each, which broadcasts to ``added``; they stand next to each other.
        dim: in which the members stand.
        most: members of a row.
    """
    members, distance = torch.arange(added.shape[dim], device=added.device), 1
    while distance < most:
        other = (members - distance).clamp(min=0)
        follows = position >= distance
        added = added + (decay * added.index_select(dim, other)).where(follows, 0.0)
        decay = decay * decay.index_select(dim, other).where(follows, 1.0)
        distance *= 2
    return decay, added


def normalized(x: torch.Tensor, eps: float | None) -> torch.Tensor:
    """``x`` with each head's length made 1; as it is without ``eps``."""
    return x if eps is None else x * aten.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def _repeated(x: torch.Tensor, groups: int) -> torch.Tensor:
    """``[C, Hk, L, N]`` with each head ``groups`` times."""
    if groups == 1:
        return x
    return x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(x.shape[0], -1, *x.shape[2:])


def _log_decays(chunks: Chunks, log_decay: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logarithms of each token's decays: ``[C, Hv, L, 1]``, or N for 1; 0 behind a chunk's last token."""
    if log_decay.dim() == 1:
        rows = log_decay.to(dtype).expand(*chunks.tokens.shape, -1)
    else:
        rows = chunks.of(log_decay).to(dtype)
    rows = chunks.present(rows).transpose(1, 2)
    return rows if rows.dim() == 4 else rows[..., None]


def _sums_between(steps: torch.Tensor) -> torch.Tensor:
    """Sums of ``steps``, ``[C, Hv, L, D]``, behind each token j up to each token i, which is -inf in front of it:
    ``[C, Hv, L, L, D]``."""
    places = torch.arange(steps.shape[2], device=steps.device)
    row, column = places[:, None, None], places[:, None]
    rows = steps[:, :, :, None].expand(-1, -1, -1, steps.shape[2], -1).masked_fill(row <= column, 0.0)
    return aten.cumsum(rows, 2).masked_fill(row < column, -torch.inf)


def _decayed_products(
    readers: tuple[torch.Tensor, ...], k: torch.Tensor, between: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """For each of ``readers`` its products with the keys of tokens that are not later, decayed since:
    ``[C, Hv, L, L]``."""
    width, decay = k.shape[2], aten.exp(between)
    if decay.shape[4] == 1:
        return tuple(product(x, k.mT) * decay[..., 0] for x in readers)
    keys = (decay * k[:, :, None]).reshape(-1, width, width, k.shape[3])  # of a token j for each i
    rows = aten.stack(readers, -1).reshape(-1, width, k.shape[3], len(readers))
    found = product(keys, rows).reshape(*k.shape[:3], width, len(readers))
    return tuple(found[..., i] for i in range(len(readers)))


def _inverse(a: torch.Tensor, most: int) -> torch.Tensor:
    """The inverse of the identity and what ``a``, ``[C, H, L, L]``, has below its diagonal; ``most``
    rows at most.

    Inverses of blocks on the diagonal are put together to those of blocks of twice their size: unlike powers of
    ``a``, nothing on the way is larger than what comes out.
    """
    width = a.shape[3]
    places = torch.arange(width, device=a.device)
    row, column = places[:, None], places
    inverse = (row == column).to(a.dtype).expand(a.shape)
    size = 1
    while size < most:
        block = torch.div(row, size, rounding_mode="floor"), torch.div(column, size, rounding_mode="floor")
        below = (block[0] == block[1] + 1) & (torch.remainder(block[0], 2) == 1)
        lower = a.masked_fill(~below, 0.0)
        inverse = inverse - (lower if size == 1 else product(product(inverse, lower), inverse))
        size *= 2
    return inverse


def _handed_on(chunks: Chunks, before: torch.Tensor, last: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """The state in front of each chunk where chunks decay states by ``last`` and add to them: ``[C, Hv, P, N]``."""
    decay, added = (x.index_select(0, chunks.link_chunks) for x in (last, added))
    position = chunks.link_positions[:, None, None, None]
    started = before.index_select(0, chunks.sequences.index_select(0, chunks.link_chunks)) * decay
    added = added + started.where(position == 0, 0.0)
    _, states = doubled(decay, added, position, 0, most_links(CHUNK))
    return in_front(chunks, before, states)


def _handed_on_as_matrices(
    chunks: Chunks,
    before: torch.Tensor,
    last: torch.Tensor,
    keys: torch.Tensor,
    written: torch.Tensor,
    reading: torch.Tensor,
) -> torch.Tensor:
    """The same where a chunk writes ``written - reading Sᵀ``, so that it takes S to ``S matrix + added``."""
    last, keys, written, reading = (x.index_select(0, chunks.link_chunks) for x in (last, keys, written, reading))
    channels = torch.arange(keys.shape[3], device=keys.device)
    decay = aten.where(channels == channels[:, None], last, 0.0)
    matrix, added = decay - product(reading.mT, keys), product(written.mT, keys)
    position = chunks.link_positions[:, None, None, None]
    started = product(before.index_select(0, chunks.sequences.index_select(0, chunks.link_chunks)), matrix)
    added = added + started.where(position == 0, 0.0)
    links = torch.arange(chunks.link_chunks.shape[0], device=keys.device)
    distance, most = 1, most_links(CHUNK if last.shape[3] == 1 else CHANNEL_CHUNK)
    while distance < most:
        other = (links - distance).clamp(min=0)
        follows = position >= distance
        added = added + product(added.index_select(0, other), matrix).where(follows, 0.0)
        distance *= 2
        if distance < most:
            matrix = product(matrix.index_select(0, other), matrix).where(follows, matrix)
    return in_front(chunks, before, added)


def in_front(chunks: Chunks, before: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The state in front of each chunk, given those of sequences and those behind links."""
    passed = states.index_select(0, chunks.links.clamp(min=0))
    follows = (chunks.links >= 0).view(-1, *[1] * (states.dim() - 1))
    return passed.where(follows, before.index_select(0, chunks.sequences))


def most_links(width: int) -> int:
    """Links that a sequence has at most in a step."""
    return -(-MOST_CHUNKED_TOKENS // width) - 1
