"""A profile run: how much memory the largest step takes beside weights and caches, measured."""

from __future__ import annotations

import ctypes
import gc
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ..cache.cache_specs import has_state, num_token_groups
from ..cache.kv_cache import allocate_kv_cache
from ..program import Program
from ..requests.checks import check_at_least
from ..step_metadata import StepMetadata

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Written to ``clear_refs`` it sets VmHWM back to VmRSS, see proc_pid_clear_refs(5)."""

_Step = tuple[torch.Tensor, torch.Tensor, StepMetadata]


@dataclass(frozen=True)
class ActivationMeasurement:
    """The memory that a step took at its peak, beside weights and caches.

    Attributes:
        peak_bytes: growth of the process at the highest point of the step; on a device, of torch's allocator.
        num_tokens, num_seqs: of the step; each sequence asked for a row of logits.
    """

    peak_bytes: int
    num_tokens: int
    num_seqs: int


def measure_activations(
    program: Program, max_num_batched_tokens: int, max_num_seqs: int, *, block_size: int = 16
) -> ActivationMeasurement:
    """Run one step of the largest size on scratch caches and measure the memory that it needs.

    The step computes ``max_num_batched_tokens`` tokens, dealt out to as many sequences as may run at once, and each
    asks for logits. On a CPU the growth of the resident memory is measured, since kernels and generated code allocate
    past any hook of torch; file pages that are read for the first time, such as those of mapped weights, do not
    count. Memory that the allocator keeps from before is given back to the system first (glibc). On a device torch's
    own statistics are read.

    The sampler's memory, at most some copies of 2**23 float32 logits, is not in it.

    Args:
        program: bound to scratch caches here, so give it its own afterwards. Nothing else may run in the process.
        max_num_batched_tokens: tokens of the step.
        max_num_seqs: sequences at most.
        block_size: tokens per block of the scratch caches.

    Raises:
        ValueError: a size is below 1.
        RuntimeError: the system does not tell a process's peak memory.
    """
    sizes = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs}
    check_at_least(1, "use a positive one", **sizes)
    block_size = program.block_size or block_size
    longest = program.max_model_len or max_num_batched_tokens
    counts = _dealt_out(max_num_batched_tokens, max_num_seqs, longest)
    spare = program.reserve(max_num_seqs, max_num_batched_tokens, longest)
    num_blocks = sum(-(-count // block_size) for count in counts) + spare
    keeps_state = has_state(program.caches)
    by_group = [num_blocks] * num_token_groups(program.caches)
    if keeps_state:
        by_group.append(len(counts) + spare)
    caches = allocate_kv_cache(program.caches, by_group, block_size, program.device)
    for layer in caches:
        for tensor in layer:
            tensor.zero_()  # so that its pages are there before
    program.bind(caches)
    # Reads the weights, makes threads and lookup tables.
    _run(program, _step([1], block_size, keeps_state))
    largest = _step(counts, block_size, keeps_state)
    peak_of = _peak_on_host if program.device.type == "cpu" else _peak_on_device
    return ActivationMeasurement(peak_of(program, largest), sum(counts), len(counts))


def _dealt_out(num_tokens: int, max_num_seqs: int, longest: int) -> list[int]:
    """Tokens of each sequence: as many sequences as possible, as even as possible, none longer than ``longest``."""
    num_seqs = min(num_tokens, max_num_seqs)
    each, left = divmod(min(num_tokens, num_seqs * longest), num_seqs)
    return [each + (i < left) for i in range(num_seqs)]


def _step(counts: list[int], block_size: int, keeps_state: bool) -> _Step:
    """Prompts of these lengths, each in blocks and a slot of its own, from the first one on."""
    blocks = [-(-count // block_size) for count in counts]
    tokens, table = sum(counts), torch.zeros(len(counts), max(blocks), dtype=torch.int32)
    positions, slots = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens, dtype=torch.int64)
    at = first_block = 0
    for row, count in enumerate(counts):
        table[row, : blocks[row]] = torch.arange(first_block, first_block + blocks[row])
        positions[at : at + count] = torch.arange(count)
        slots[at : at + count] = torch.arange(count) + first_block * block_size
        at, first_block = at + count, first_block + blocks[row]
    lengths = torch.tensor(counts)
    ends = lengths.cumsum(0)
    step = StepMetadata(
        slot_mapping=slots,
        block_table=table,
        query_start_loc=torch.cat([ends.new_zeros(1), ends]).int(),
        seq_lens=lengths.int(),
        logits_rows=ends - 1,
        token_lengths=lengths.repeat_interleave(lengths),
        state_read=torch.full((len(counts),), -1, dtype=torch.int32) if keeps_state else None,
        state_write=torch.arange(len(counts), dtype=torch.int32) if keeps_state else None,
    )
    return torch.zeros(1, tokens, dtype=torch.int64), positions[None], step


def _run(program: Program, step: _Step) -> torch.Tensor:
    with torch.inference_mode():
        return program(*step)


def _peak_on_host(program: Program, step: _Step) -> int:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        before = _resident()
    except OSError as error:
        raise RuntimeError(
            f"the peak of this process's memory cannot be read ({error}); Linux with {_CLEAR_REFS} is needed, "
            "use an estimate instead"
        ) from error
    logits = _run(program, step)
    after = _resident()
    del logits
    mapped = max(0, after["RssFile"] - before["RssFile"])
    return max(0, after["VmHWM"] - before["VmRSS"] - mapped)


def _resident() -> dict[str, int]:
    """Bytes of this process that are in memory: now (VmRSS), at most (VmHWM), and of files (RssFile).

    Raises:
        OSError: the system does not say.
    """
    found = dict(re.findall(r"^(VmRSS|VmHWM|RssFile):\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE))
    if len(found) < 3:
        raise OSError(f"{_STATUS} lacks VmRSS, VmHWM or RssFile")
    return {name: int(size) * 1024 for name, size in found.items()}


def _peak_on_device(program: Program, step: _Step) -> int:
    device = torch.get_device_module(program.device)
    device.synchronize()
    device.empty_cache()
    device.reset_peak_memory_stats()
    before = device.memory_allocated()
    logits = _run(program, step)
    device.synchronize()
    peak = device.max_memory_allocated()
    del logits
    return max(0, int(peak - before))
