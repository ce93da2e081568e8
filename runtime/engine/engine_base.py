"""An engine without its requests: construction for a program, resources, and maintenance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import proxy

from ..batching import Batcher, Batches, PreemptionCost, make_policy
from ..batching.cache_events import CacheEvents
from ..blocks import BlockManager
from ..cache.block_copier import BlockCopier
from ..cache.cache_specs import bytes_per_block, bytes_per_slot, whole_caches
from ..cache.host_blocks import HostBlocks
from ..cache.kv_cache import allocate_kv_cache
from ..cache.state_pool import snapshot_interval
from ..memory import keep_freed_memory
from ..profiling.profile import Profile
from ..program import KVCache, Program, TappedProgram
from ..requests.detokenizer import Tokenizer
from ..requests.outputs import RequestOutput
from ..requests.sampling_params import SamplingParams
from ..requests.validation import PromptLimits
from ..sampling.sampler import Sampler
from ..speculation.config import drafts_with_head, planned_drafts
from ..speculation.mtp import MtpProgram
from .cache_setup import block_groups, key_variant, longest_sequence, open_traffic, plan_caches, warm_up
from .core import EngineCore, Result
from .draft_setup import make_drafting, share_of_memory
from .engine_options import DEFAULT_BLOCK_SIZE, EngineOptions
from .look_ahead import LookAhead
from .model_runner import ModelRunner
from .pipelined import PipelinedSteps
from .state import EngineState
from .step_runner import StepRunner


class EngineBase:
    """A program with a KV cache, batches and a loop; ``Engine`` says how requests come in and answers go out.

    Args:
        program: the compiled model.
        tokenizer: a HuggingFace tokenizer; without one prompts are token ids and outputs have no text.
        eos_token_ids: ids that end a completion.
        default_params: of requests that bring none; None: ``SamplingParams()``.
        free_memory: bytes that the KV cache may take where the options do not size it; None: see
            ``default_num_blocks``.
        batches: to form batches that run to their end, for comparison; None: continuous batching.
        before_step: called where a step is about to be planned.
        draft_program: the compiled draft model, or head, that ``speculative_config`` asks for; on the same device.
        fingerprint: of all that keys and values depend on besides the tokens, for ``kv_store``; None: not known.
        sizes: of the KV cache and of steps, and how to schedule: the fields of ``EngineOptions``.

    Raises:
        ValueError: one of them is out of range, or does not fit the others, the model or the device.
    """

    def __init__(
        self,
        program: Program,
        tokenizer: Tokenizer | None = None,
        *,
        eos_token_ids: Iterable[int] = (),
        default_params: SamplingParams | None = None,
        free_memory: int | None = None,
        batches: Batches | None = None,
        before_step: Callable[[], None] = lambda: None,
        draft_program: Program | None = None,
        fingerprint: bytes | None = None,
        **sizes: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(int(token) for token in eos_token_ids)
        self._default_params = SamplingParams() if default_params is None else default_params
        options = EngineOptions(**sizes)
        longest = program.max_model_len
        if options.max_model_len is not None and longest is not None and options.max_model_len > longest:
            raise ValueError(f"max_model_len={options.max_model_len} exceeds the model's {longest}; lower it")
        block_size = options.block_size or program.block_size or DEFAULT_BLOCK_SIZE
        draft_memory = None
        if draft_program is not None and drafts_with_head(options.speculative_config):
            program = MtpProgram(cast(TappedProgram, program), cast(TappedProgram, draft_program))
        elif draft_program is not None:
            share = share_of_memory(program, draft_program)
            if options.cache_bytes is not None:
                options = replace(options, kv_cache_memory=int(share * options.cache_bytes))
            if free_memory is not None:
                draft_memory = int((1 - share) * free_memory)
                free_memory -= draft_memory
        planned = plan_caches(program, block_size, options, free_memory)
        groups = block_groups(program, planned, block_size, options)
        self.block_manager = BlockManager(groups, block_size, enable_prefix_caching=options.enable_prefix_caching)
        max_model_len, reason = longest_sequence(self.block_manager, options.max_model_len, longest)

        self.limits = PromptLimits(program.vocab_size, max_model_len, reason)
        specs = whole_caches(program)
        cost = PreemptionCost(bytes_per_block(specs, 1), state_bytes=bytes_per_slot(specs))
        self.batcher = Batcher(
            self.block_manager,
            options.max_num_seqs,
            options.max_num_batched_tokens,
            max_model_len,
            policy=make_policy(options.policy),
            preemption=options.preemption,
            cost=cost,
            max_queue=options.max_queue,
            batches=batches,
            snapshot_interval=snapshot_interval(specs, block_size),
            key_variant=partial(key_variant, proxy(program)),  # the runner keeps it, until the engine is shut down
        )
        num_drafts = planned_drafts(options.speculative_config)
        spare = program.reserve(options.max_num_seqs, options.max_num_batched_tokens, max_model_len, num_drafts)
        cache = allocate_kv_cache(
            program.caches, [count + spare for count in planned.device], block_size, program.device
        )
        stored = [group.num_host_blocks for group in groups]
        host: KVCache = []
        if options.kv_store is not None:
            if program.device.type != "cpu" or program.block_size:
                raise ValueError("kv_store works on CPUs only; omit it")
            if not min(stored):
                raise ValueError(f"swap_space={options.swap_space!r} holds no block from kv_store; raise it to 1GiB")
            make_blocks = getattr(program, "host_blocks", partial(HostBlocks, program.caches))
            host_blocks = make_blocks(stored, block_size)
            host = host_blocks.cache
            self.batcher.planner.traffic = traffic = open_traffic(
                program, self.block_manager, host_blocks, options, fingerprint
            )
        elif min(stored):
            host = allocate_kv_cache(program.caches, stored, block_size)
        self.runner = ModelRunner(program, cache, block_size, options.max_num_seqs, max_model_len)
        warm_up(program, options)
        self.sampler = Sampler(sorted(self.eos_token_ids))
        make_copier = getattr(program, "copier", BlockCopier)
        copier = make_copier(cache, host, [spec.group for spec in program.caches])
        state = EngineState(self.batcher, self.runner, cost)
        if options.kv_store is not None:
            state.traffic, copier.on_copied = traffic, traffic.note_copied
        runs_ahead = program.device.type == "npu" if options.async_scheduling is None else options.async_scheduling
        kind: type[StepRunner] = LookAhead if runs_ahead else StepRunner
        if getattr(program, "num_stages", 1) > 1 and options.async_scheduling is not False:
            kind = PipelinedSteps
        steps = kind(state, self.sampler, copier)
        if kind is not PipelinedSteps:
            state.drafting = make_drafting(
                state,
                options,
                forces_tokens=tokenizer is not None,
                runs_ahead=runs_ahead,
                draft_program=draft_program,
                free_memory=draft_memory,
            )
        elif options.speculative_config is not None:
            raise ValueError(
                "speculative_config: a pipeline drafts with async_scheduling=False only; omit one of them"
            )
        self._core = EngineCore(state, steps, before_step)
        if program.device.type == "cpu":
            keep_freed_memory()

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence, prompt included."""
        return self.limits.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that bring none; ``dataclasses.replace`` makes others of them."""
        return self._default_params

    def has_unfinished(self) -> bool:
        """True if :meth:`step` has something to run or to return."""
        state = self._core.state
        return bool(state.updated or state.completions or state.pieces or self._core.steps.is_under_way)

    def cancel(self, request_id: str) -> bool:
        """End a waiting or running request and free its blocks; its last output comes with the next ``step``.

        Returns:
            Whether there was an unfinished request of that id.
        """
        return self.cancel_many([request_id]) == 1

    def cancel_many(self, request_ids: Iterable[str]) -> int:
        """As ``cancel``, of several requests in one turn.

        Returns:
            The number of unfinished requests that were there.
        """
        return self._core.turns.take(self._core.cancel, list(request_ids))

    def stats(self) -> dict[str, int | float]:
        """Figures since the engine was made.

        Returns:
            ``queue_length`` and ``running`` sequences, ``queue_tokens`` of those that wait, ``preemptions``, of which
            ``swaps``; ``steps``, those of at most 1, 8, 16, … tokens (``steps_up_to_8``), ``computed_tokens``
            (those computed again included), ``generated_tokens``,
            ``prompt_tokens`` of prompts that began to run, of which ``cached_tokens`` came from the prefix cache;
            requests that ended, by reason: ``finished_stop``, ``finished_length``, ``finished_cancelled``,
            ``finished_timeout``, ``finished_error``; ``failed`` sequences; ``model_seconds`` (packing and model) and
            ``total_seconds`` of steps; ``block_size``; with ``async_scheduling`` the figures of ``LookAhead.stats``;
            with a pipeline ``steps_beside_others``, which were launched while another one was under way;
            where steps run as whole graphs, on an NPU, ``graph_sizes`` that are ready, ``graph_sizes_dropped`` and
            ``operator_steps``; with several ranks ``ranks``, ``rank_restarts`` and
            ``collective_seconds`` that the first rank spent in exchanges; with drafts those of ``Drafting.stats``;
            with ``kv_store`` those of ``Traffic.stats``;
            and the block manager's figures, see ``blocks.inspection.stats``, among them
            ``blocks_total``, ``blocks_used``, ``blocks_cached``, ``blocks_free`` (used + cached + free = total at
            every moment), ``prefix_hit_rate``, ``evictions``; of models with state also ``state_slots_total``,
            ``_used``, ``_cached``, ``_free``.
        """
        return self._core.turns.take(self._core.stats)

    def profile(self, *, reset: bool = False) -> Profile:
        """Times of the engine's steps and requests since it was made, or since the last call with ``reset``.

        Prefill and decode apart, tokens per second, percentiles of TTFT, TPOT and ITL, seconds of each phase of a
        step; ``save_trace(path)`` writes the last steps for chrome://tracing or Perfetto.
        """
        return self._core.turns.take(self._core.profile, reset)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as is needed when weights change. An ``LLM`` does it by itself when a weight is
        written to in place; writing to ``.data`` goes unseen."""
        self._core.turns.take(self._core.forget_prefixes)

    def num_stored(self) -> int:
        """Blocks that were given to ``kv_store`` so far, those that still wait to be written included."""
        return self._core.turns.take(self._core.num_stored)

    def is_stored(self, count: int) -> bool:
        """True if of the first ``count`` blocks that were given to ``kv_store`` none waits: what has not failed is
        there. Steps store beside them; while none runs, this goes on with it."""
        return self._core.turns.take(self._core.is_stored, count)

    def watch_prefix_cache(self, *, with_tokens: bool = False) -> CacheEvents:
        """Collect the changes of the prefix cache from now on; see ``CacheEvents``.

        Raises:
            ValueError: prefix caching is off, or tokens are asked of a model with states alone.
        """
        self.batcher.cache_events = CacheEvents(self.block_manager, with_tokens=with_tokens)
        return self.batcher.cache_events

    def defragment(self) -> int:
        """Move used and cached blocks of the KV cache to its front, with the next step; returns how many move.

        Free blocks lie together then, so that a request of negative ``priority``, which is given neighboring blocks
        where it can be, finds them without moving others. No output changes, and nothing has to be defragmented to be
        served: any free block will do. Nothing moves while sequences are being swapped.
        """
        return self.in_turn(self._core.defragment)

    def in_turn(self, action: Callable[[], Result]) -> Result:
        """Call ``action`` while no step runs and no other thread uses the engine; returns what it returns."""
        return self._core.turns.take(self._core.settled, action)

    def compute_again(self) -> None:
        """Forget all keys and values: requests under way are computed again from their tokens, prompt and output,
        with the weights as they are now. For ``before_step`` and ``in_turn``."""
        self._core.compute_again()

    def notice_failure(self) -> None:
        """Let a program of several ranks start again if one of them has ended while no step ran, or set
        ``device_lost``; a step does it by itself."""
        self._core.turns.take(self._core.notice_failure)

    @property
    def device_lost(self) -> str | None:
        """What the device reported when it was lost, with which every request ended; None while it computes."""
        return self._core.device_lost

    def shutdown(self) -> list[RequestOutput]:
        """End what has not ended as cancelled, free the KV cache and the program, and refuse prompts from now on.

        Returns:
            The last outputs of ``submit``'s requests; those of ``stream`` get their last piece.
        """
        self._core.turns.take(self._core.shut_down)
        self.__dict__.pop("runner", None)
        return self._core.turns.take(self._core.step)
