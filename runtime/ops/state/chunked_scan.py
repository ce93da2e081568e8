"""`pagoda::selective_scan` in chunks, in plain ATen operators with static shapes: the fallback of lowering on Ascend.

The states behind all tokens of a chunk are computed together, by doubling, and so are those that chunks pass on. All
of them lie in memory at once: T * E * N elements in fp32.
"""

from __future__ import annotations

import torch

from .chunked_recurrence import Chunks, doubled, in_front, most_links
from .gathered_states import states_before
from .state_slots import compute_dtype

aten = torch.ops.aten

SCAN_CHUNK = 16
"""Most tokens of a chunk."""


def chunked_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    round_state: bool,
    state: torch.Tensor,
    state_read: torch.Tensor,
    *tables: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of ``pagoda::selective_scan`` that leaves the pool of states alone.

    Args:
        x, dt, A, B, C, round_state, state, state_read: of the operator.
        tables: of ``state_tables.chunk_tables`` for chunks of ``SCAN_CHUNK``, in its order.

    Returns:
        ``[1, T, E]`` in the dtype of ``x``, and the states behind the step's tokens, ``[S, E, N]`` in that of
        ``state``.
    """
    chunks, wide = Chunks(*tables), compute_dtype(x)
    steps = chunks.present(chunks.of(dt).to(wide))  # [C, L, E]
    writes = (steps * chunks.of(x).to(wide))[..., None] * chunks.of(B).to(wide)[:, :, None]  # [C, L, E, N]
    decay = aten.exp(steps[..., None] * A.to(wide))
    place = torch.arange(chunks.tokens.shape[1], device=x.device)[:, None, None]
    decay, added = doubled(decay, writes, place, 1, SCAN_CHUNK)

    before = states_before(state, state_read).to(wide)
    last, passed = (y[:, -1].index_select(0, chunks.link_chunks) for y in (decay, added))
    position = chunks.link_positions[:, None, None]
    started = before.index_select(0, chunks.sequences.index_select(0, chunks.link_chunks)) * last
    passed = passed + started.where(position == 0, 0.0)
    _, passed = doubled(last, passed, position, 0, most_links(SCAN_CHUNK))
    states = added + decay * in_front(chunks, before, passed)[:, None]

    seen = states.to(x.dtype).to(wide) if round_state else states
    result = (seen * chunks.of(C).to(wide)[:, :, None]).sum(-1)
    # What is behind a chunk's last token changes no state.
    after = states[:, -1].index_select(0, chunks.last)
    return chunks.to_tokens(result).to(x.dtype), after.to(state.dtype)
