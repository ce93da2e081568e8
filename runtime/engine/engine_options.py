"""Options of an engine: sizes of its KV cache and steps, and scheduling."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..block_store.kinds import check_address
from ..option import option
from ..requests.checks import check_at_least, check_bool
from ..speculation.config import read_speculative_config

DEFAULT_BLOCK_SIZE = 32
"""For a program that takes any; those lowered for an NPU bring their own."""


NPU_WARMUPS = ("full", "lazy")
KV_STORE_WRITES = ("reused", "all")
STORE_WAIT = 0.2
MOST_STORE_WAIT = 60

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = _UNITS[_letter] = 1024**_power


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of an engine's KV cache and steps, and how it schedules.

    Attributes:
        block_size: tokens per block of the KV cache. None: what the program was compiled for, 128 for an NPU, which
            takes multiples of 16; else 32.
        num_blocks: blocks in the KV cache; layers with a sliding window get no more than they can use.
        kv_cache_memory: the same in bytes, or as ``"4GiB"``; not together with ``num_blocks``. By default a CPU gets
            min(max_num_seqs x max_model_len tokens, 4 GiB, half of the free memory), committed on first use; an NPU
            the same without the 4 GiB, and nine tenths of what is free.
        min_kv_cache_memory: what a CPU's cache shrinks to when there is little to do, in bytes or as ``"512MiB"``.
            None: it keeps all memory that it once needed.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens in one step; longer prompts are cut into chunks.
        max_model_len: most tokens of one sequence, prompt and output. None: what the model and the cache allow.
        enable_prefix_caching: keep computed blocks for prompts that begin with the same tokens, and for the next turn
            of a chat.
        policy: who comes first: ``"fcfs"``, ``"priority"``, ``"sjf"`` (the shortest job), ``"fair"`` (clients take
            turns) or ``"prefix"`` (the most cached tokens); see ``batching.policies``.
        preemption: how a sequence gives up its blocks when they run out: ``"recompute"``, ``"swap"`` (to host memory,
            where there is room) or ``"auto"``, whatever measures as cheaper.
        swap_space: host memory for swapped sequences, in bytes or as ``"1GiB"``.
        max_queue: most completions that wait, those of one prompt included; more are refused with ``QueueFull``.
            None: any number.
        async_scheduling: plan and launch each step while the device still computes the one before it; ends by a stop
            are noticed a step late, and nobody sees more than before. None: on an NPU; on a CPU, which computes
            itself what it plans, there is nothing to gain.
        npu_warmup: when an NPU's program compiles or captures steps of the sizes that are planned: ``"full"``, all of
            them before the engine takes requests, each compared with the operators called one by one; or
            ``"lazy"``, each when a step first needs it, which waits for it and is not compared.
        speculative_config: propose tokens and verify several in one step, with vLLM's keys: ``{"method": "suffix"}``
            or ``{"method": "draft_model", "model": "small", "num_speculative_tokens": 7}`` or ``{"method": "mtp"}``;
            tokens stay the same. See ``speculation.config.SpeculativeConfig``. None: only what
            ``draft_forced_tokens`` says.
        draft_forced_tokens: verify in one step the tokens that a grammar of ``structured_outputs`` forces.
        kv_store: where blocks are kept for later engines and others: ``"folder:///path"``, ``"valkey://host:6379"``
            (``valkeys://`` for TLS) or ``"mooncake://host:50051"``. None: nowhere.
        kv_store_size: most bytes in such a folder, or as ``"100GiB"``; of Mooncake, bytes of memory that the engine
            adds. None: 16 GiB, or a tenth of what is free; of Mooncake 1 GiB.
        kv_store_key_file: file with a secret of 16 to 64 bytes that seals the entries; who does not have it can
            neither make nor change one. None: the seal finds accidents only.
        kv_store_wait: most seconds that a request that could run waits for its blocks from the store; None: 0.2.
        kv_store_write: the blocks that are stored: ``"reused"``, those that two requests have asked for, or
            ``"all"``.

    Raises:
        ValueError: a value out of range, or a name that there is not.
    """

    block_size: int | None = option(None, "Tokens per KV-cache block.")
    num_blocks: int | None = option(None, "Blocks in the KV cache.")
    kv_cache_memory: int | str | None = option(None, "The same as memory, e.g. 4GiB.")
    min_kv_cache_memory: int | str | None = option(None, "Size the cache shrinks to when idle.")
    max_num_seqs: int = option(64, "Sequences at the same time.")
    max_num_batched_tokens: int = option(2048, "Tokens per step.")
    max_model_len: int | None = option(None, "Tokens per sequence, prompt included.")
    enable_prefix_caching: bool = option(True, "Disable prefix caching.")
    policy: str = option("fcfs", "fcfs, priority, sjf, fair or prefix.")
    preemption: str = option("auto", "auto, recompute or swap.")
    swap_space: int | str = option(0, "Host memory for swapped sequences, e.g. 1GiB.")
    max_queue: int | None = option(None, "Refuse to start with more prompts.")
    async_scheduling: bool | None = option(
        None, "Plan each step while the one before runs; by default on an NPU (else: --no-async-scheduling)."
    )
    npu_warmup: str = option("full", "On an NPU: full (compile all steps first), or lazy.")
    speculative_config: Mapping[str, Any] | None = option(
        None, 'Several tokens a step, e.g. {"method": "suffix"}, "ngram", "draft_model" or "mtp".'
    )
    draft_forced_tokens: bool = option(True, "Compute tokens that a grammar forces one by one.")
    kv_store: str | None = option(
        None, "Keep KV blocks in folder:///path, valkey://host:6379 or mooncake://host:50051."
    )
    kv_store_size: int | str | None = option(None, "Most bytes of that folder, or lent to Mooncake, e.g. 100GiB.")
    kv_store_key_file: str | None = option(None, "File with the secret that seals stored blocks.")
    kv_store_wait: float | None = option(None, "Seconds that a request waits for stored blocks; else 0.2.")
    kv_store_write: str = option("reused", "Store reused (asked for twice) or all blocks.")

    def __post_init__(self) -> None:
        from ..batching import make_policy, preemption_mode  # costs a command that only shows its help too much

        remedy = "use at least 1, or omit it"
        optional = {name: getattr(self, name) for name in ("block_size", "num_blocks", "max_model_len", "max_queue")}
        sizes = {"max_num_seqs": self.max_num_seqs, "max_num_batched_tokens": self.max_num_batched_tokens}
        check_at_least(1, remedy, **sizes, **{name: size for name, size in optional.items() if size is not None})
        make_policy(self.policy)
        preemption_mode(self.preemption)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_bool("draft_forced_tokens", self.draft_forced_tokens)
        if self.speculative_config is not None:
            read_speculative_config(self.speculative_config)
        if self.npu_warmup not in NPU_WARMUPS:
            known = " or ".join(map(repr, NPU_WARMUPS))
            raise ValueError(f"npu_warmup={self.npu_warmup!r} is unknown; use {known}")
        if self.async_scheduling is not None:
            check_bool("async_scheduling", self.async_scheduling)
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError(
                f"num_blocks={self.num_blocks} and kv_cache_memory={self.kv_cache_memory!r} both size the KV cache; "
                "give one of them"
            )
        for size in ("cache_bytes", "min_cache_bytes", "swap_bytes", "store_bytes"):
            getattr(self, size)  # raises for what cannot be read
        self._check_store()

    def _check_store(self) -> None:
        wait = self.store_wait
        if type(wait) not in (int, float) or not 0 <= wait <= MOST_STORE_WAIT:
            raise ValueError(
                f"kv_store_wait={wait!r} is not a number of seconds from 0 to {MOST_STORE_WAIT}; give one"
            )
        if self.kv_store_write not in KV_STORE_WRITES:
            known = " or ".join(map(repr, KV_STORE_WRITES))
            raise ValueError(f"kv_store_write={self.kv_store_write!r} is unknown; use {known}")
        if self.kv_store is None:
            return
        check_address(self.kv_store)
        if not self.enable_prefix_caching:
            raise ValueError("kv_store needs enable_prefix_caching=True, which finds the blocks; omit one of them")

    @property
    def cache_bytes(self) -> int | None:
        """Bytes that ``kv_cache_memory`` stands for."""
        return None if self.kv_cache_memory is None else parse_memory(self.kv_cache_memory)

    @property
    def min_cache_bytes(self) -> int | None:
        """Bytes that ``min_kv_cache_memory`` stands for."""
        least = self.min_kv_cache_memory
        return None if least is None else parse_memory(least, "min_kv_cache_memory")

    @property
    def store_wait(self) -> float:
        """Seconds that ``kv_store_wait`` stands for."""
        return STORE_WAIT if self.kv_store_wait is None else self.kv_store_wait

    @property
    def store_bytes(self) -> int | None:
        """Bytes that ``kv_store_size`` stands for."""
        return None if self.kv_store_size is None else parse_memory(self.kv_store_size, "kv_store_size")

    @property
    def swap_bytes(self) -> int:
        """Bytes that ``swap_space`` stands for."""
        return 0 if self.swap_space in (0, "0") else parse_memory(self.swap_space, "swap_space")


def parse_memory(value: int | str, name: str = "kv_cache_memory") -> int:
    """Bytes meant by an int or by text such as ``"4GiB"``, ``"512 MB"``, ``"2g"`` (g is GiB, GB is 10**9).

    Raises:
        ValueError: it cannot be read, or is not positive; ``name`` is the argument that the message names.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        amount = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower()) if isinstance(value, str) else None
        if match is None or match[2] not in _UNITS:
            raise ValueError(f'{name}={value!r} is not a size; use bytes or text such as "4GiB" or "512MiB"')
        amount = int(float(match[1]) * _UNITS[match[2]])
    if amount < 1:
        raise ValueError(f"{name}={value!r} is not a positive size; use at least the bytes of one block")
    return amount
