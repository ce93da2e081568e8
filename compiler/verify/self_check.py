"""The numeric self-check: the program against the model run by HuggingFace, sequence by sequence, without a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ...passes import NotFinite, TracedGraph, UnsupportedModel
from ...passes.graph.fx_nodes import value
from ...runtime.cache.cache_specs import has_state, num_token_groups
from ...runtime.cache.kv_cache import allocate_kv_cache
from ...runtime.npu_errors.device_lost import raise_if_lost
from ...runtime.phases import phase
from ...runtime.program import CacheSpec, Program, StateSpec
from ...runtime.step_metadata import PREVIOUS_HIDDEN, StepMetadata
from ..capture.model_facts import configs, max_positions, takes_hidden, takes_positions
from ..capture.state_layers import has_recurrences
from ..report import Verdict, first_line
from ..tolerance import TOLERANCE, judged_share, row_errors, typical
from .wide_products import WideProducts

INT8_TOLERANCE = 0.3
"""Of programs with int8 caches, for the median of the rows. The graph was compared with ``TOLERANCE`` before anything
was rounded (``pipeline.run_pipeline``), so this one has to tell rounding, which moves the median row by up to 0.14,
from keys or values that are read with scales of another head or token, or with none: those move it by more than 1."""
WEIGHT_TOLERANCE = {8: 1.0, 4: 3.9}
"""Likewise of programs with weights of so many bits, each of which ``rounded_weights`` compares by itself. Rounding
random weights moves the median row by up to 0.45 at 8 bits and 2.9 at 4; logits that have nothing to do with the
model's differ by 4.1 and more."""


_KINDS_OF_ROWS = 997


@dataclass(frozen=True)
class Schedule:
    """The sequences that a check runs, and the cuts of their prompts.

    Attributes:
        lengths: tokens of each sequence.
        first: of each prompt, how many tokens come with the first step.
        block_size: tokens per cache block, where the program takes any.
        decoded: tokens of each sequence that come one at a time, the last of them with a step of its own.
    """

    lengths: tuple[int, ...]
    first: tuple[int, ...]
    block_size: int
    decoded: int = 4

    def within(self, limit: int) -> Schedule:
        """The same with sequences of at most ``limit`` tokens."""
        return replace(self, lengths=tuple(max(1 + self.decoded, min(n, limit)) for n in self.lengths))


MODEL_SCHEDULE = Schedule((11, 27, 48), (3, 9, 6), 4)
"""For the comparison with the model's own logits."""
STATE_SCHEDULE = Schedule((7, 23, 70), (3, 9, 6), 4)
"""The same for a model that keeps state: one sequence is longer than a chunk of a recurrence."""
SHORT_SCHEDULE = Schedule((16,), (6,), 4, decoded=4)
"""The same for a program whose layers were compared before, or that was stored."""


@dataclass
class Reference:
    """Sequences of tokens and the logits that are right for them. Made once, used for every check.

    Attributes:
        tokens: one ``[length]`` int64 tensor per sequence.
        logits: one ``[length, vocab]`` float32 tensor per sequence.
        dtype: that the model computes in.
        schedule: how the sequences are run.
        tolerance: largest error of a logit that is right, in standard deviations of its row.
        share: of the rows, how many have to be right.
        hidden_size: of the hidden rows that the model takes with its tokens (``hidden_rows``); 0: it takes none.
        of_program: the logits are those of a program over rounded weights, if it has such (``reference_of_program``).
    """

    tokens: list[torch.Tensor]
    logits: list[torch.Tensor]
    dtype: torch.dtype
    schedule: Schedule
    tolerance: float
    share: float = 1.0
    hidden_size: int = 0
    of_program: bool = False

    def beginning(self, schedule: Schedule) -> Reference:
        """The first tokens of the first sequences, as many as ``schedule`` says: no others change their logits."""
        lengths = [min(n, len(t)) for n, t in zip(schedule.lengths, self.tokens, strict=False)]
        return replace(
            self,
            tokens=[t[:n] for n, t in zip(lengths, self.tokens, strict=False)],
            logits=[t[:n] for n, t in zip(lengths, self.logits, strict=False)],
            schedule=replace(schedule, lengths=tuple(lengths)),
        )

    @property
    def prompts(self) -> list[int]:
        """The number of tokens of each sequence that are prefilled; the rest is decoded."""
        return [len(t) - self.schedule.decoded for t in self.tokens]


@phase("reference")
def reference_of_model(model: nn.Module, schedule: Schedule | None = None) -> Reference:
    """The logits of the model when HuggingFace runs it, each sequence alone and without a cache.

    Args:
        model: it.
        schedule: the sequences; by default such as the kind of model needs.

    Raises:
        UnsupportedModel: the model does not run on ``input_ids`` alone.
        NotFinite: its logits are NaN or infinite.
    """
    table = getattr(model.get_input_embeddings(), "weight", None)  # type: ignore[operator]
    if table is None:
        raise UnsupportedModel(f"{type(model).__name__} has no single table of token embeddings")
    if schedule is None:
        schedule = STATE_SCHEDULE if has_recurrences(type(model)) else MODEL_SCHEDULE
    schedule = schedule.within(max_positions(model) or 1 << 30)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, table.shape[0], (n,), generator=generator) for n in schedule.lengths]
    logits = []
    names_positions = takes_positions(model)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    hidden_size = configs(model)[0].hidden_size if takes_hidden(model) else 0
    for sequence in tokens:
        ids = sequence[None].to(device)
        extra = {"position_ids": torch.arange(len(sequence), device=device)[None]} if names_positions else {}
        if hidden_size:
            rows = hidden_rows(sequence, torch.arange(len(sequence)), hidden_size)
            extra[PREVIOUS_HIDDEN] = rows.to(device, dtype)
        try:
            with torch.no_grad(), WideProducts():
                output = model(input_ids=ids, use_cache=False, return_dict=True, **extra)
        except Exception as error:
            raise UnsupportedModel(
                f"{type(model).__name__} does not run on input_ids alone: {first_line(error)}"
            ) from error
        logits.append(output.logits[0].float().cpu())
    if not all(bool(rows.isfinite().all()) for rows in logits):
        raise NotFinite(not_finite(type(model).__name__, model.named_parameters()))
    return Reference(tokens, logits, dtype, schedule, TOLERANCE.get(dtype, 0.3), judged_share(dtype), hidden_size)


def reference_of_program(program: Program, like: Reference) -> Reference:
    """The logits of a program for a short sequence that it runs in one step.

    Later runs in chunks, over caches, by another process or kernel, are compared with them.

    Args:
        program: bound to a small cache of its own here.
        like: says the tokens, the dtype and what is tolerated.

    Raises:
        NotFinite: the logits are NaN or infinite.
    """
    tokens = like.tokens[-1][: SHORT_SCHEDULE.lengths[0]]
    schedule = replace(SHORT_SCHEDULE, lengths=(len(tokens),))
    blank = replace(like, tokens=[tokens], logits=[torch.empty(len(tokens), 0)], schedule=schedule, of_program=True)
    with phase("verify"):
        ((_, logits, _),) = compared_steps(program, blank, alone=True)
    if not logits.isfinite().all():
        raise NotFinite("the logits of all layers are NaN or infinite, and those of the first layers are not")
    return replace(blank, logits=[logits.clone()])


def hidden_rows(tokens: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Make hidden rows ``[1, T, size]``, float32, for a model that takes them: any numbers that follow from a token
    and its position, so that they are the same however a sequence is cut. All are bfloat16 numbers, so that a graph
    in float32 reads what one in half precision does."""
    table = torch.randn(_KINDS_OF_ROWS, size, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    return table[(31 * tokens + 7 * positions) % _KINDS_OF_ROWS][None]


def not_finite(model: str, named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The reason why logits are NaN or infinite: the first tensor that is, where one is.

    Args:
        model: name of its class.
        named: its weights.
    """
    for name, tensor in named:
        if tensor.dtype in TOLERANCE and not tensor.is_meta and not tensor.isfinite().all():
            what = "NaN" if tensor.isnan().any() else "an infinity"
            return f"{name!r} of {model} holds {what}; the weights are broken, download them again"
    return f"{model} itself returns NaN or infinite logits from finite weights; use dtype='float32' or 'bfloat16'"


def run_alone(
    traced: TracedGraph, run: Callable[..., Sequence[Any]], constants: Mapping[str, Any], tokens: torch.Tensor
) -> torch.Tensor:
    """Logits ``[length, vocab]``, float32, of one sequence by a graph without caches.

    Args:
        traced: the graph.
        run: function of its inputs.
        constants: by input.
        tokens: ``[length]`` int64.
    """
    with torch.no_grad():
        results = run(*arguments_alone(traced, constants, tokens))
    logits: torch.Tensor = results[0][0]
    return logits.float()


def arguments_alone(traced: TracedGraph, constants: Mapping[str, Any], tokens: torch.Tensor) -> list[Any]:
    """Values of the inputs of a graph without caches for one sequence of ``[length]`` tokens."""
    device = value(traced.placeholder(traced.input_ids)).device
    positions = torch.arange(len(tokens), device=device)[None]
    given = {**constants, traced.input_ids: tokens[None].to(device), traced.position_ids: positions}
    if PREVIOUS_HIDDEN in traced.step_inputs:
        example = value(traced.placeholder(PREVIOUS_HIDDEN))
        rows = hidden_rows(tokens, torch.arange(len(tokens)), int(example.shape[-1]))
        given[PREVIOUS_HIDDEN] = rows.to(device, example.dtype)
    return [given.get(node.name, len(tokens)) for node in traced.placeholders]


@phase("verify")
def check(program: Program, reference: Reference, *, alone: bool = False, weight_bits: int | None = None) -> Verdict:
    """Run the reference's sequences through ``program`` as a runtime would, and compare every row of logits.

    All prompts but one token each share the first steps, cut into chunks that cross blocks; then the sequences
    decode together, and at last each of them alone. Where they keep state, the last tokens are computed once more
    from the states before, which nothing but their sequences' own steps may have changed.

    Args:
        program: bound to a small cache of its own here. One that raises is not right.
        reference: what to run and what is right.
        alone: run each sequence in one step by itself instead, which a graph that is not finished can do too.
        weight_bits: the fewest that the program's weights are rounded to; None where none is.
    """
    return judge(
        compared_steps(program, reference, alone=alone), tolerating_rounding(reference, program.caches, weight_bits)
    )


def tolerating_rounding(
    reference: Reference, caches: Iterable[CacheSpec | StateSpec], weight_bits: int | None = None
) -> Reference:
    """The reference by which a program is judged that rounds its caches, or its weights to so many bits."""
    if weight_bits is None and not any(spec.has_scales for spec in caches):
        return reference
    tolerance = INT8_TOLERANCE if weight_bits is None or reference.of_program else WEIGHT_TOLERANCE[weight_bits]
    return replace(reference, tolerance=tolerance, share=0.5)


def judge(compared: Iterable[tuple[int, torch.Tensor, torch.Tensor]], reference: Reference) -> Verdict:
    """The verdict on logits and those that are right, as ``compared_steps`` yields them. Where that raises, the
    program is not right; ``DeviceLost`` alone is raised from here."""
    tolerance, share = reference.tolerance, reference.share
    # Errors of the steps that are alike are judged together.
    errors: dict[int, list[float]] = {}
    try:
        for group, logits, expected in compared:
            errors.setdefault(group, []).extend(row_errors(logits, expected).tolist())
    except Exception as error:
        raise_if_lost(error)
        return Verdict(False, float("inf"), tolerance, 0, f"the program failed: {first_line(error)}")
    judged = max(typical(group, share) for group in errors.values())
    reason = f"logits differ from the model's by {judged:.3g} standard deviations (limit {tolerance:.3g})"
    reason = "" if judged <= tolerance else reason
    return Verdict(not reason, max(map(max, errors.values())), tolerance, sum(map(len, errors.values())), reason)


def compared_steps(
    program: Program, reference: Reference, *, alone: bool = False
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Run the steps of ``check``: for each, the group of steps that are alike, its logits, and the right ones."""
    for step in planned_steps(program, reference, alone=alone):
        logits = program(step.input_ids, step.position_ids, step.metadata)
        yield step.group, logits.float().cpu(), step.expected


@dataclass(frozen=True)
class PlannedStep:
    """A step of a check.

    Attributes:
        group: of the steps that are alike.
        input_ids, position_ids, metadata: what the program gets.
        expected: the right logits, a row for each token.
    """

    group: int
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    metadata: StepMetadata
    expected: torch.Tensor


def planned_steps(program: Program, reference: Reference, *, alone: bool = False) -> Iterator[PlannedStep]:
    """The steps of ``check``, to be run in their order; the program is bound to a small cache of its own for them."""
    state = _PagedState(program, reference)
    for group, steps in enumerate(_alone_schedule(reference) if alone else _mixed_schedule(reference)):
        for step in steps:
            yield state.plan(group, step)
    if state.states and not alone:
        yield state.plan(group + (len(reference.tokens) > 1), state.rewound())


_Step = list[tuple[int, int]]
"""``(sequence, tokens)`` pairs."""


def _mixed_schedule(reference: Reference) -> list[list[_Step]]:
    prompts = reference.prompts
    sequences = range(len(prompts))
    first = [(s, min(n, prompt)) for s, (n, prompt) in enumerate(zip(reference.schedule.first, prompts, strict=True))]
    rest = [(s, prompt - first[s][1]) for s, prompt in enumerate(prompts) if prompt > first[s][1]]
    together = [[(s, 1) for s in sequences] for _ in range(reference.schedule.decoded - 1)]
    apart = [[(s, 1)] for s in sequences]
    # A group of few rows is not judged by its share of right ones: one sequence decodes alone in all of its steps.
    decoded = [together, apart] if len(prompts) > 1 else [together + apart]
    return [group for group in ([first], [rest] if rest else [], *decoded) if group]


def _alone_schedule(reference: Reference) -> list[list[_Step]]:
    return [[[(s, len(tokens))]] for s, tokens in enumerate(reference.tokens)]


class _PagedState:
    """Three sequences in interleaved blocks of a small cache of their own."""

    def __init__(self, program: Program, reference: Reference) -> None:
        self.program = program
        self.reference = reference
        count = len(reference.tokens)
        self.block_size = program.block_size or reference.schedule.block_size
        width = max(-(-len(t) // self.block_size) for t in reference.tokens)
        self.table = np.arange(width * count, dtype=np.int32).reshape(width, count).T[:, ::-1].copy()
        self.done = [0] * count
        most = sum(len(t) for t in reference.tokens)
        spare = program.reserve(count, most, width * self.block_size)
        caches = program.caches
        self.states = has_state(caches)
        self.slots = [(count + s, s) for s in range(count)]  # that a sequence wrote last, and the one before
        num_blocks = [width * count + spare] * num_token_groups(caches)
        cache = allocate_kv_cache(caches, [*num_blocks, 2 * count + spare], self.block_size, program.device)
        for spec, tensors in zip(caches, cache, strict=True):
            if isinstance(spec, StateSpec):  # a sequence that begins must not read what others left
                tensors[0].fill_(torch.nan)
        program.bind(cache)

    def rewound(self) -> _Step:
        """A step of the last token of each sequence, from the state before it."""
        self.slots = [(before, last) for last, before in self.slots]
        self.done = [done - 1 for done in self.done]
        return [(s, 1) for s in range(len(self.done))]

    def plan(self, group: int, step: _Step) -> PlannedStep:
        """The step that comes next, of ``(sequence, tokens)`` pairs."""
        ids, positions, slots, lengths, expected = [], [], [], [], []
        size = self.block_size
        reads, writes = self._state_slots(step)
        for s, n in step:
            at = np.arange(self.done[s], self.done[s] + n)
            ids.append(self.reference.tokens[s][at[0] : at[-1] + 1])
            positions.append(at)
            slots.append(self.table[s][at // size].astype(np.int64) * size + at % size)
            lengths.append(np.full(n, len(self.reference.tokens[s])))
            expected.append(self.reference.logits[s][at[0] : at[-1] + 1])
            self.done[s] += n
        counts = [n for _, n in step]

        def tensor(a: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(a)).to(dtype)

        position_ids = tensor(np.concatenate(positions), torch.int64)[None]
        width = self.reference.hidden_size
        rows = hidden_rows(torch.cat(ids), position_ids[0], width) if width else None
        metadata = StepMetadata(
            slot_mapping=tensor(np.concatenate(slots), torch.int64),
            block_table=tensor(self.table[[s for s, _ in step]], torch.int32),
            query_start_loc=tensor(np.cumsum([0, *counts]), torch.int32),
            seq_lens=tensor(np.array([self.done[s] for s, _ in step]), torch.int32),
            logits_rows=torch.arange(sum(counts)),
            token_lengths=tensor(np.concatenate(lengths), torch.int64),
            state_read=tensor(np.array(reads), torch.int32) if self.states else None,
            state_write=tensor(np.array(writes), torch.int32) if self.states else None,
            previous_hidden=None if rows is None else rows.to(self.program.device, self.reference.dtype),
        )
        return PlannedStep(group, torch.cat(ids)[None], position_ids, metadata, torch.cat(expected))

    def _state_slots(self, step: _Step) -> tuple[list[int], list[int]]:
        """The slots that the sequences of a step read and write: the same one where some of several decode."""
        reads, writes = [], []
        for s, n in step:
            last, before = self.slots[s]
            reads.append(last if self.done[s] else -1)
            if not (n == 1 and len(step) > 1 and s % 2):
                self.slots[s] = before, last
            writes.append(self.slots[s][0])
        return reads, writes
