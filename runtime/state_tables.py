"""Index tables of a step for operators with state that are spelt out over all of its sequences (``gathered_states``).

They are made on the host, from the lengths of the step's parts of sequences and from who begins.
"""

from __future__ import annotations

import torch

CONVOLUTION_TABLES = ("convolution_rows", "kept_rows")
"""Names of what ``convolution_tables`` makes."""
CHUNK_TABLES = (
    *("chunk_tokens", "chunk_sequences", "chunk_links", "chunk_rows"),
    *("link_chunks", "link_positions", "last_chunks"),
)
"""Names of what ``chunk_tables`` makes."""
STATE_TABLES = frozenset({*CONVOLUTION_TABLES, *CHUNK_TABLES})
MOST_CHUNKED_TOKENS = 4096
"""Tokens of one sequence in a step that is computed in chunks: states go from chunk to chunk in a number of rounds
that is part of the graph."""


def convolution_tables(query_start_loc: torch.Tensor, state_read: torch.Tensor, taps: int) -> dict[str, torch.Tensor]:
    """Where the inputs of a causal convolution stand.

    They are rows of a matrix: ``taps - 1`` of each sequence's state, oldest first, then those of the step's tokens,
    then one of zeros.

    Args:
        query_start_loc: ``[S + 1]`` int32; the step has no tokens behind the last.
        state_read: ``[S]`` int32, negative where a sequence begins.
        taps: of the convolution.

    Returns:
        ``convolution_rows``: ``[T, taps]`` int64, the inputs that each token sees, oldest first.
        ``kept_rows``: ``[S, taps - 1]`` int64, the last inputs of each sequence after the step.
    """
    kept, starts, counts = taps - 1, query_start_loc[:-1].long(), query_start_loc.diff().long()
    sequences, tokens = len(counts), int(query_start_loc[-1])
    zeros = sequences * kept + tokens
    begins = state_read < 0

    def rows(sequence: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """The rows of inputs by their index in their sequence's part of the step; negative ones are in its state."""
        before = torch.where(begins[sequence], zeros, sequence * kept + (place + kept))
        return torch.where(place < 0, before, sequences * kept + starts[sequence] + place)

    every = torch.arange(sequences)
    owner = torch.repeat_interleave(every, counts)
    place = torch.arange(tokens) - starts[owner]
    return {
        "convolution_rows": rows(owner[:, None], place[:, None] + torch.arange(-kept, 1)),
        "kept_rows": rows(every[:, None], counts[:, None] + torch.arange(-kept, 0)),
    }


def chunk_tables(query_start_loc: torch.Tensor, state_read: torch.Tensor, most: int) -> dict[str, torch.Tensor]:
    """The cut of a step's parts of sequences into chunks of one width L, at most ``most`` tokens.

    L is ``most`` or the length of the longest part, C the number of chunks: one at least of each sequence. A chunk
    that another one of its sequence follows is a link, which passes a state on; there are Q of them, or one that
    nothing reads.

    Args:
        query_start_loc: ``[S + 1]`` int32; the step has no tokens behind the last.
        state_read: not needed.
        most: tokens of a chunk.

    Returns:
        ``chunk_tokens``: ``[C, L]`` int64, the tokens of each chunk; -1 where it has fewer.
        ``chunk_sequences``: ``[C]`` int64.
        ``chunk_links``: ``[C]`` int64, the link in front of each chunk; -1 for the first of a sequence.
        ``chunk_rows``: ``[T]`` int64, where each token stands in ``chunk_tokens``, flattened.
        ``link_chunks``: ``[Q]`` int64, which chunk each link is.
        ``link_positions``: ``[Q]`` int64, how many links of its sequence are before it.
        ``last_chunks``: ``[S]`` int64, the last chunk of each sequence.

    Raises:
        ValueError: a sequence has more than ``MOST_CHUNKED_TOKENS`` tokens.
    """
    starts, counts = query_start_loc[:-1].long(), query_start_loc.diff().long()
    longest = max(1, int(counts.max()))
    if longest > MOST_CHUNKED_TOKENS:
        raise ValueError(
            f"a sequence has {longest} tokens in the step, of at most {MOST_CHUNKED_TOKENS} that its recurrence "
            f"takes; lower max_num_batched_tokens to {MOST_CHUNKED_TOKENS}"
        )
    width = min(most, longest)
    chunks = (-(-counts // width)).clamp(min=1)
    first = chunks.cumsum(0) - chunks
    sequence = torch.repeat_interleave(torch.arange(len(counts)), chunks)
    number = torch.arange(len(sequence)) - first[sequence]
    place = number[:, None] * width + torch.arange(width)
    passes_on = number + 1 < chunks[sequence]
    links = passes_on.nonzero()[:, 0] if bool(passes_on.any()) else torch.zeros(1, dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    at = torch.arange(len(owner)) - starts[owner]
    return {
        "chunk_tokens": torch.where(place < counts[sequence, None], starts[sequence, None] + place, -1),
        "chunk_sequences": sequence,
        "chunk_links": torch.where(number > 0, passes_on.cumsum(0) - passes_on.long() - 1, -1),
        "chunk_rows": first[owner] * width + at,
        "link_chunks": links,
        "link_positions": number[links],
        "last_chunks": first + chunks - 1,
    }
