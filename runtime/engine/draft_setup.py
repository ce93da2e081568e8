"""Sets up an engine's drafters, and measures what further rows of a step cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from ..autocast import without_autocast
from ..cache.cache_specs import bytes_per_block, has_state, num_token_groups, token_specs
from ..cache.kv_cache import default_num_blocks
from ..program import Program
from ..requests.request import Request
from ..speculation.config import LENGTHS, planned_drafts, read_speculative_config
from ..speculation.draft_model import DraftModel
from ..speculation.drafter import Drafter
from ..speculation.drafting import Drafting
from ..speculation.forced_tokens import ForcedTokens
from ..speculation.mtp import MtpDrafter, MtpProgram
from ..speculation.step_seconds import StepSeconds
from ..speculation.suffix_tree import SuffixDrafter
from ..step_metadata import StepMetadata
from .beam_submission import BeamSubmission
from .cache_setup import warm_up
from .engine_options import DEFAULT_BLOCK_SIZE, EngineOptions
from .model_runner import PackedStep
from .state import EngineState

logger = logging.getLogger(__name__)

_MEASURED: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_RUNS: Final = 4  # of each size; the first two record it
_MOST_SECONDS: Final = 2.0


def make_drafting(
    state: EngineState,
    options: EngineOptions,
    *,
    forces_tokens: bool,
    runs_ahead: bool,
    draft_program: Program | None = None,
    free_memory: int | None = None,
) -> Drafting | None:
    """Make the drafters that the options ask for, and have the batcher's planner ask them; None without any.

    Args:
        state: of the engine, whose program has its caches.
        options: of the engine.
        forces_tokens: requests may have grammars.
        runs_ahead: see ``Drafting``.
        draft_program: of the draft model, if the options ask for one; a head is part of the program of ``state``.
        free_memory: see ``EngineBase``; what the draft model may take of it.

    Raises:
        ValueError: the draft model is missing, or keeps state.
    """
    drafters: list[Drafter] = [ForcedTokens()] if forces_tokens and options.draft_forced_tokens else []
    if options.speculative_config is not None:
        config = read_speculative_config(options.speculative_config)
        if isinstance(state.runner.program, MtpProgram):
            drafters.append(_head(state, options, state.runner.program, config.num_speculative_tokens))
        elif config.method not in (DraftModel.name, MtpDrafter.name):
            drafters.append(SuffixDrafter(config))
        elif draft_program is None:
            raise ValueError("speculative_config: an Engine needs draft_program=, or use LLM, which makes it")
        else:
            most = config.num_speculative_tokens
            drafters.append(_draft_model(state, options, draft_program, free_memory, most))
    return draft_with(
        state,
        drafters,
        runs_ahead=runs_ahead,
        measures=options.speculative_config is not None,
        num_planned=planned_drafts(options.speculative_config) if state.runner.program.block_size is not None else 0,
    )


def draft_with(
    state: EngineState,
    drafters: Sequence[Drafter],
    *,
    runs_ahead: bool = False,
    measures: bool = False,
    num_planned: int = 0,
) -> Drafting | None:
    """Have the planner of an engine ask drafters; returns None without any.

    Args:
        state: of the engine.
        drafters: asked in this order.
        runs_ahead: see ``Drafting``.
        measures: run steps of a few sizes now, to know what they cost; not where sizes are planned.
        num_planned: drafts of each request for which the program has planned sizes of steps; 0: it has none.
    """
    batcher, program = state.batcher, state.runner.program

    def is_beam(request: Request) -> bool:
        return isinstance(state.completions[request.request_id].owner, BeamSubmission)

    drafting = None
    if drafters:
        drafting = Drafting(
            drafters,
            batcher,
            most=num_planned or LENGTHS[-1],
            vocab_size=program.vocab_size,
            restart_length=program.restart_length,
            is_beam=is_beam,
            is_planned=num_planned > 0,
            one_query=program.block_size is not None and any([spec.has_scales for spec in program.caches]),
        )
        drafting.runs_ahead = runs_ahead
        if measures and not num_planned and program.device.type == "cpu":
            size, pools = state.runner.block_size, batcher.block_manager.token_pools
            room = min([pool.num_blocks * size for pool in pools], default=batcher.max_model_len)
            most = min(batcher.max_num_seqs * (1 + LENGTHS[-1]), batcher.max_num_batched_tokens)
            most = min(most, room, batcher.max_model_len)
            measure_steps(program, drafting.lengths.seconds, most, size)
    state.drafting = batcher.planner.drafting = drafting
    return drafting


def share_of_memory(program: Program, draft_program: Program) -> float:
    """Return the share of the memory for both KV caches that the target's takes: both hold as many tokens."""
    own, drafts = bytes_per_block(program.caches, 1), bytes_per_block(draft_program.caches, 1)
    return own / (own + drafts) if own else 0.5


def _draft_model(
    state: EngineState, options: EngineOptions, program: Program, free_memory: int | None, most: int
) -> DraftModel:
    """A drafter whose KV cache holds as many tokens as the target's, or as there can be in running requests."""
    batcher = state.batcher
    size = options.block_size or program.block_size or DEFAULT_BLOCK_SIZE
    longest = min(batcher.max_model_len, program.max_model_len or batcher.max_model_len)
    num_blocks = options.max_num_seqs * -(-longest // size)
    pools = batcher.block_manager.token_pools
    if pools:
        tokens = max([pool.max_blocks for pool in pools]) * batcher.block_manager.block_size
        num_blocks = min(num_blocks, -(-tokens // size))
    elif token_specs(program.caches):
        num_blocks = default_num_blocks(
            token_specs(program.caches), size, options.max_num_seqs, longest, memory=free_memory
        )
    drafter = DraftModel(
        program,
        num_blocks,
        size,
        most=most,
        vocab_size=state.runner.program.vocab_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=longest,
    )
    logger.info(
        "draft model: KV cache of %d blocks, %d bytes", num_blocks, num_blocks * bytes_per_block(program.caches, size)
    )
    warm_up(program, options)
    if program.device.type == "cpu":
        measure_steps(program, drafter.seconds, min(2 * options.max_num_seqs, longest, num_blocks * size), size)
    return drafter


def _head(state: EngineState, options: EngineOptions, program: MtpProgram, most: int) -> MtpDrafter:
    """A drafter that runs the head over the model's blocks."""
    batcher = state.batcher
    blocks = batcher.block_manager
    drafter = MtpDrafter(program, blocks, most=most, max_num_batched_tokens=options.max_num_batched_tokens)
    logger.info("head: %d bytes of a block", bytes_per_block(program.head_caches, blocks.block_size))
    room = min(pool.num_blocks for pool in blocks.token_pools) * blocks.block_size
    rows = min(2 * options.max_num_seqs, batcher.max_model_len, room)
    measure_steps(program, drafter.seconds, rows, blocks.block_size, program.draft)
    return drafter


def measure_steps(
    program: Program,
    seconds: StepSeconds,
    most: int,
    block_size: int,
    call: Callable[..., torch.Tensor] | None = None,
) -> None:
    """Run steps of few sizes on blocks that nobody has yet, and record their durations.

    Args:
        program: on the CPU, with its caches.
        seconds: gets the durations.
        most: rows of a step.
        block_size: tokens per block.
        call: is called in place of the program.
    """
    began = time.perf_counter()
    for rows in [rows for rows in _MEASURED if rows <= most]:
        durations = []
        packed = _junk_step(program, rows, block_size)
        for _ in range(_RUNS):
            started = time.perf_counter()
            with torch.inference_mode(), without_autocast("cpu"):
                (program if call is None else call)(*packed)
            durations.append(time.perf_counter() - started)
        seconds.measure(rows, min(durations), is_settled=True)
        if time.perf_counter() - began > _MOST_SECONDS:
            return


def _junk_step(program: Program, rows: int, size: int) -> PackedStep:
    """A sequence of so many tokens, in the first blocks of the caches."""
    places = torch.arange(rows)
    table = torch.arange(-(-rows // size), dtype=torch.int32)[None]
    stored = has_state(program.caches)
    groups = num_token_groups(program.caches)
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
