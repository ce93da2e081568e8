"""Warm-up: every planned size is compiled or captured before requests come, and compared with its operators.

A size is exercised by steps of its own (see ``steps``), each run twice: by the graph, padded to its size, and by
calling the operators one by one, unpadded. The check compares the logits of every requested row, and what each token
of the step wrote into every cache. All sizes run their first step before any runs its second, so that each also runs
after all others were captured.

A size whose numbers differ, or that cannot be made, is left out with a warning that names it; the others stay. Before
and after each run of a graph, blocks of requests are looked at: no step of ours may write there.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .....runtime.cache.cache_specs import has_state
from .....runtime.npu_errors.device_lost import raise_if_lost
from .....runtime.parallel.group import RankGroup
from .....runtime.phases import note, phase
from .....runtime.program import CacheSpec, StateSpec
from .....runtime.step_metadata import StepMetadata
from ....report import SizeCheck, first_line
from ....tolerance import Tolerance
from ..route import PlannedSize, Route
from .steps import SpareRoom, StepShape, warm_up_step

log = logging.getLogger(__name__)

GUARDED_BYTES = 64 * 2**20
"""How much of what requests own is compared before and after a graph runs: all blocks of smaller caches, else as many
of each, evenly spread, the first and the last among them."""


class Linked(Protocol):
    """A program around a route, see ``link.linker.LinkedProgram``.

    Attributes:
        vocab_size: columns of the logits.
        tolerance: by how much a graph may differ from its operators; None: what holds for the dtype of the logits.
        group: the ranks that run the program together; None where this process does alone.
    """

    vocab_size: int
    tolerance: Tolerance | None
    group: RankGroup | None

    def arguments(self, input_ids: Tensor, position_ids: Tensor, step: StepMetadata) -> list[Any]:
        """Values of the graph's inputs for a step."""

    def logits(self, outputs: Sequence[Any], step: StepMetadata) -> Tensor:
        """Return the logits ``[R, vocab_size]`` of the requested rows from the graph's outputs."""


@phase("warm-up")
def warm_up(program: Linked, route: Route) -> list[SizeCheck]:
    """Compile or capture every planned size of ``route`` and compare it; what became of each.

    Raises:
        DeviceLost: the device computes nothing any more.
    """
    sizes = route.planned_sizes()
    made = [SizeCheck(size.name) for size in sizes]
    started = time.perf_counter()
    for variant in range(max((len(size.shapes) for size in sizes), default=0)):
        left = [(size, check) for size, check in zip(sizes, made, strict=True) if not check.reason]
        left = [(size, check) for size, check in left if variant < len(size.shapes)]
        began = time.perf_counter()
        for done, (size, check) in enumerate(left):
            note(_progress(done, len(left), time.perf_counter() - began, again=variant > 0))
            _check(program, route, size, variant, check)
    note("")
    route.note_warm()
    if made:
        kept = sum(not check.reason for check in made)
        log.info("%d of %d planned sizes are ready after %.1f s", kept, len(sizes), time.perf_counter() - started)
    return made


def _progress(done: int, count: int, seconds: float, *, again: bool) -> str:
    left = f", {seconds / done * (count - done):.0f} s left" if done else ""
    return f"{done} of {count} sizes{' again' if again else ''}{left}"


def _check(program: Linked, route: Route, size: PlannedSize, variant: int, check: SizeCheck) -> None:
    """Run one of the steps of a size and compare it; the size is dropped where that fails."""
    began = time.perf_counter()
    error, reason = 0.0, ""
    try:
        if not variant:
            size.compile()
    except Exception as raised:
        error, reason = _failed(raised)
    reason = _agreed(program.group, reason)
    if not reason:
        try:
            error, reason = _compared(program, route, size, size.shapes[variant], variant)
        except Exception as raised:
            error, reason = _failed(raised)
        reason = _agreed(program.group, reason)
    check.error, check.reason = max(check.error, error), reason
    check.seconds += time.perf_counter() - began
    if reason:
        log.warning("%s do not run as a whole graph: %s", size.name, reason)
        size.drop(reason)


def _failed(raised: Exception) -> tuple[float, str]:
    """The error of a graph that cannot be made or run, and why."""
    raise_if_lost(raised)
    return math.inf, f"it fails: {first_line(raised)}"


def _agreed(group: RankGroup | None, reason: str) -> str:
    """Why a size is dropped on every rank: this rank's reason, or that another rank has one."""
    if group is None or not group.agree(bool(reason), "max"):
        return reason
    return reason or "another rank drops it"


def _compared(program: Linked, route: Route, size: PlannedSize, shape: StepShape, variant: int) -> tuple[float, str]:
    """The largest error of a step, and why that is too much, or ""."""
    room = route.spare_room
    assert room is not None
    specs = route.traced.caches
    step = warm_up_step(shape, room, program.vocab_size, variant=variant, has_state=has_state(specs))
    if not room.holds(step[2]):
        raise AssertionError("a dummy step uses blocks other than the spare ones")
    asked = step[2].logits_rows.shape[0]
    caches, guard = Spare(route, room, step[2]), Guard(route)
    with torch.inference_mode():  # as the engine runs its steps
        caches.reset()
        fitted = route.fit(*step)
        outputs = size.run(program.arguments(*fitted))
        logits = program.logits(outputs, fitted[2])[:asked]
        tolerance = program.tolerance or Tolerance.of(logits.dtype)
        logits = logits.float().clone()
        written = [rows.clone() for rows, _ in caches.rows()]
        changed = guard.restored()
        caches.reset()
        expected = program.logits(route.run_by_operator(program.arguments(*step)), step[2])[:asked].float()
    if changed:
        return math.inf, f"it writes into {changed}, which belongs to requests"
    error = tolerance.error(logits, expected)
    if not error <= tolerance.limit:
        return error, f"its logits differ from the operators' by {error:.3g} standard deviations{_limit(tolerance)}"
    worst = error
    for name, rows, (right, rounding) in zip(caches.names, written, caches.rows(), strict=True):
        apart = rows if rounding is None else right + _beyond(rows - right, rounding)
        error = tolerance.error(apart, right)
        worst = max(worst, error)
        if not error <= tolerance.limit:
            return worst, f"its writes to {name} differ by {error:.3g} standard deviations{_limit(tolerance)}"
    return worst, ""


def _limit(tolerance: Tolerance) -> str:
    return f" (limit {tolerance.limit:.3g})"


def _beyond(difference: Tensor, rounding: Tensor) -> Tensor:
    """What of a difference is more than ``rounding``."""
    return difference.sign() * (difference.abs() - rounding).clamp_min(0)


class Spare:
    """The part of the caches that a step of ours uses.

    Args:
        route: bound.
        room: that the step lies in.
        step: it.

    Attributes:
        names: of the tensors whose rows are compared.
    """

    def __init__(self, route: Route, room: SpareRoom, step: StepMetadata) -> None:
        self._route, self._room = route, room
        slots = step.slot_mapping - room.first_block * room.block_size
        self._blocks, self._offsets = slots // room.block_size, slots % room.block_size
        self.names = [name for name, *_ in self._tensors()]

    def _tensors(self) -> Iterator[tuple[str, CacheSpec | StateSpec, int, tuple[Tensor, ...]]]:
        """Name, entry and index of each tensor that holds values, with the others of its entry."""
        for i, (spec, tensors) in enumerate(zip(self._route.traced.caches, self._route.kv_cache, strict=True)):
            parts = spec.parts()
            for j, part in enumerate(parts):
                if not part.name.endswith("_scale"):
                    yield f"{part.name}_{i}", spec, j, tensors

    def reset(self) -> None:
        """Put zeros where the step writes, and the same numbers as ever into the state that it reads."""
        room = self._room
        last = room.first_block + room.num_blocks
        for spec, tensors in zip(self._route.traced.caches, self._route.kv_cache, strict=True):
            if isinstance(spec, StateSpec):
                (state,) = tensors
                state[room.write_slot].zero_()
                generator = torch.Generator().manual_seed(0)
                drawn = torch.randn(state.shape[1:], generator=generator) / 8
                state[room.read_slot].copy_(drawn.to(state.dtype))
                continue
            for tensor in tensors:
                tensor[room.first_block : last].zero_()

    def rows(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """What the step wrote into each tensor, ``[tokens, n]`` in float32, or of a state ``[1, n]``; and for int8 by
        how much a number moves that is rounded to the neighboring integer."""
        room = self._room
        last = room.first_block + room.num_blocks
        for _, spec, j, tensors in self._tensors():
            if isinstance(spec, StateSpec):
                yield tensors[j][room.write_slot].float().reshape(1, -1), None
                continue
            blocks, offsets = self._blocks.to(tensors[j].device), self._offsets.to(tensors[j].device)
            values = tensors[j][room.first_block : last][blocks, offsets].float()
            if not spec.has_scales:
                yield values.flatten(1), None
                continue
            scales = tensors[2 + j][room.first_block : last]
            scales = (scales.transpose(1, 2) if spec.scales_by_head else scales)[blocks, offsets][..., None]
            yield (values * scales).flatten(1), scales.expand_as(values).flatten(1)


class Guard:
    """Blocks and slots that belong to requests, as they were.

    Args:
        route: bound.
    """

    def __init__(self, route: Route) -> None:
        self._kept: list[tuple[str, Tensor, Tensor, Tensor]] = []
        owned = {True: route.owned_slots, False: route.owned_blocks}
        share = GUARDED_BYTES // max(1, sum(map(len, route.kv_cache)))
        for i, (spec, tensors) in enumerate(zip(route.traced.caches, route.kv_cache, strict=True)):
            count = owned[isinstance(spec, StateSpec)]
            for part, tensor in zip(spec.parts(), tensors, strict=True):
                if not count:
                    continue
                size = tensor[0].numel() * tensor.element_size()
                kept = min(count, max(2, share // max(size, 1)))
                places = torch.linspace(0, count - 1, kept).round().long().to(tensor.device)
                self._kept.append((f"{part.name}_{i}", tensor, places, tensor.index_select(0, places)))

    def restored(self) -> str:
        """The name of a block or slot that has changed, or ""; what has is put back."""
        found = ""
        for name, tensor, places, before in self._kept:
            now = tensor.index_select(0, places)
            # Compared as bits: memory that nobody wrote may hold NaN.
            if torch.equal(_bits(now), _bits(before)):
                continue
            changed = (_bits(now) != _bits(before)).flatten(1).any(1).nonzero().flatten().tolist()
            found = found or f"{name}[{int(places[changed[0]])}]"
            tensor.index_copy_(0, places, before)
        return found


def _bits(tensor: Tensor) -> Tensor:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(whole[tensor.element_size()])
