"""Sets up an engine's drafters, and measures what further rows of a step cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from ..autocast import without_autocast
from ..cache.cache_specs import has_state
from ..requests.request import Request
from ..speculation.config import LENGTHS, read_speculative_config
from ..speculation.draft_lengths import StepSeconds
from ..speculation.drafter import Drafter
from ..speculation.drafting import Drafting
from ..speculation.forced_tokens import ForcedTokens
from ..speculation.suffix_tree import SuffixDrafter
from ..step_metadata import StepMetadata
from .beam_submission import BeamSubmission
from .engine_options import EngineOptions
from .model_runner import PackedStep
from .state import EngineState

_MEASURED: Final = (1, 2, 4, 8, 16, 32, 64)
_RUNS: Final = 4  # of each size; the first two record it
_MOST_SECONDS: Final = 2.0


def make_drafting(
    state: EngineState, options: EngineOptions, *, forces_tokens: bool, runs_ahead: bool
) -> Drafting | None:
    """Make the drafters that the options ask for, and have the batcher's planner ask them; None without any.

    Args:
        state: of the engine, whose program has its caches.
        options: of the engine.
        forces_tokens: requests may have grammars.
        runs_ahead: see ``Drafting``.
    """
    drafters: list[Drafter] = [ForcedTokens()] if forces_tokens and options.draft_forced_tokens else []
    if options.speculative_config is not None:
        drafters.append(SuffixDrafter(read_speculative_config(options.speculative_config)))
    return draft_with(state, drafters, runs_ahead=runs_ahead, measures=options.speculative_config is not None)


def draft_with(
    state: EngineState, drafters: Sequence[Drafter], *, runs_ahead: bool = False, measures: bool = False
) -> Drafting | None:
    """Have the planner of an engine ask drafters; returns None without any.

    Args:
        state: of the engine.
        drafters: asked in this order.
        runs_ahead: see ``Drafting``.
        measures: run steps of a few sizes now, to know what they cost.
    """
    batcher, program = state.batcher, state.runner.program

    def is_beam(request: Request) -> bool:
        return isinstance(state.completions[request.request_id].owner, BeamSubmission)

    drafting = None
    if drafters:
        drafting = Drafting(
            drafters,
            batcher,
            most=LENGTHS[-1],
            vocab_size=program.vocab_size,
            restart_length=program.restart_length,
            is_beam=is_beam,
        )
        drafting.runs_ahead = runs_ahead
        if measures and program.device.type == "cpu":
            with without_autocast("cpu"):
                measure_steps(state, drafting.lengths.seconds)
    state.drafting = batcher.planner.drafting = drafting
    return drafting


def measure_steps(state: EngineState, seconds: StepSeconds) -> None:
    """Run steps of few sizes on blocks that nobody has yet, and record their durations."""
    began = time.perf_counter()
    most = min(state.batcher.max_num_seqs * (1 + LENGTHS[-1]), state.batcher.max_num_batched_tokens)
    room = min([pool.num_blocks for pool in state.batcher.block_manager.token_pools], default=most)
    for rows in _MEASURED:
        if rows > min(most, room * state.runner.block_size, state.batcher.max_model_len):
            return
        durations = []
        packed = _junk_step(state, rows)
        for _ in range(_RUNS):
            started = time.perf_counter()
            with torch.inference_mode():
                state.runner.program(*packed)
            durations.append(time.perf_counter() - started)
        seconds.measure(rows, min(durations), is_settled=True)
        if time.perf_counter() - began > _MOST_SECONDS:
            return


def _junk_step(state: EngineState, rows: int) -> PackedStep:
    """A sequence of so many tokens, in the first blocks of the caches."""
    size = state.runner.block_size
    places = torch.arange(rows)
    table = torch.arange(-(-rows // size), dtype=torch.int32)[None]
    stored = has_state(state.runner.program.caches)
    groups = len(state.batcher.block_manager.token_pools)
    return (
        torch.zeros(1, rows, dtype=torch.int64),
        places[None],
        StepMetadata(
            slot_mapping=places if groups else torch.zeros(rows, dtype=torch.int64),
            block_table=table if groups else torch.zeros(1, 1, dtype=torch.int32),
            query_start_loc=torch.tensor(np.array([0, rows], np.int32)),
            seq_lens=torch.tensor([rows], dtype=torch.int32),
            logits_rows=places,
            token_lengths=places + 1,
            groups=((places, table),) * max(groups - 1, 0),
            state_read=torch.tensor([-1], dtype=torch.int32) if stored else None,
            state_write=torch.tensor([0], dtype=torch.int32) if stored else None,
        ),
    )
