"""What coverage.py says of one architecture whose weights are rounded: ``--quantization int8`` and the others.

The reference is transformers over the same rounded weights: each matrix that the program holds rounded is replaced,
in a copy of the model, by what its integers and scales mean (that they are near the float ones is what compiling
checks). After each prefix of the served tokens the reported
log-probabilities are compared. With inputs of 8 bits they differ by what rounding inputs costs, with 16 bits hardly.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LIMITS = {8: 0.2, 16: 2e-3}
"""Largest median error of the tokens in nats, by the bits that inputs keep. Between models that have nothing to do
with each other it is 1 and more."""


@dataclass
class RoundedRow:
    """What happened to one architecture.

    Attributes:
        name: of it.
        result: ``served``, ``off`` (beyond ``LIMITS``), ``refused``, ``failed``, ``build failed``.
        matrices: that are rounded, those of experts one by one.
        share: of the parameters, how many are in them.
        median, largest: errors of the tokens' log-probabilities, in nats.
        dropped_passes: those that the self-check took out.
        reason: why it is not served.
    """

    name: str
    result: str
    matrices: int = 0
    share: float = 0.0
    median: float | None = None
    largest: float | None = None
    dropped_passes: str = ""
    reason: str = ""


def rounded_row(name: str, model: nn.Module, copy: nn.Module, quantization: str, serve: Any) -> RoundedRow:
    """Serve a model with rounded weights and compare it with transformers over the same.

    Args:
        name: of the architecture.
        model: a live module.
        copy: another one with the same weights, which are replaced.
        quantization: as in ``LLM``.
        serve: a function of ``model`` and options of ``LLM``: the engine, and a function of that: pairs of a prompt
            and its completion.
    """
    from hf_reference import forced

    row = RoundedRow(name, "refused")
    try:
        llm, answers = serve(model, quantization=quantization)
    except Exception as error:
        row.reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        return row
    row.result = "failed"
    row.dropped_passes = ", ".join(dropped for dropped, _ in llm.compile_report.dropped_passes)
    try:
        row.matrices, numbers = round_copy(llm.program, model, copy)
        row.share = numbers / sum(p.numel() for p in model.parameters())
        errors = []
        for prompt, completion in answers():
            served = list(completion.token_ids)
            expected = forced(copy, prompt, served)
            for reported, after in zip(completion.logprobs, expected.logprobs, strict=True):
                errors.append(max(abs(entry.logprob - float(after[token])) for token, entry in reported.items()))
    except Exception as error:
        row.reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        return row
    row.median, row.largest = statistics.median(errors), max(errors)
    limit = LIMITS[16 if quantization.endswith("weight-only") else 8]
    row.result = "served" if row.median <= limit else "off"
    if row.result == "off":
        row.reason = f"the median token is off by {row.median:.2g} nats"
    return row


@torch.no_grad()
def round_copy(program: Any, model: nn.Module, copy: nn.Module) -> tuple[int, int]:
    """Replace the weights in ``copy`` that the program over ``model`` holds rounded by what it holds.

    Returns:
        how many matrices they are, and how many numbers.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    embeddings = next((n for n, m in model.named_modules() if m is model.get_input_embeddings()), "")  # type: ignore[operator]
    copied = iter(program.copied_weights[len(program.linkage.folded) :])
    matrices = numbers = 0
    for packed in program.linkage.packed:
        sources = [next(copied) for _ in packed.sources]
        if packed.quantization is None:
            continue
        held = program._args[program._at[packed.name]]
        for weight, rounded in zip(sources, meant(held, sources, packed), strict=True):
            matrices += 1 if weight.dim() == 2 else weight.shape[0]
            numbers += weight.numel()
            for name in names[id(weight)]:
                module, _, leaf = name.rpartition(".")
                if len(names[id(weight)]) == 1 or module != embeddings:  # the head alone of what is tied
                    setattr(copy.get_submodule(module), leaf, nn.Parameter(rounded, requires_grad=False))
    return matrices, numbers


def meant(held: torch.Tensor, sources: list[torch.Tensor], packed: Any) -> list[torch.Tensor]:
    """The weights that lie in ``held`` one after the other, in their own sizes.

    Whether a matrix is ``[out, in]`` or ``[in, out]`` in the model is told by which of the two is the nearer one.
    """
    from torch_pagoda.runtime.ops.linear.quantized_weight import packed_bytes

    scheme, found = packed.quantization, []
    for turned in (packed.transposed,) if sources[0].dim() == 3 else (False, True):
        inputs = sources[0].shape[-2 if turned else -1]
        rows = sum(weight.shape[1 if turned else 0] for weight in sources)
        alike = all(weight.shape[-2 if turned else -1] == inputs for weight in sources)
        if sources[0].dim() == 3 or (alike and held.numel() == packed_bytes(rows, inputs, scheme)):
            found.append(_unpacked(held, sources, scheme, turned))

    def distance(weights: list[torch.Tensor]) -> float:
        return max(float((a.float() - b.float()).norm()) for a, b in zip(weights, sources, strict=True))

    return min(found, key=distance)


def _unpacked(held: torch.Tensor, sources: list[torch.Tensor], scheme: Any, turned: bool) -> list[torch.Tensor]:
    from torch_pagoda.runtime.ops.linear.quantized_weight import restored_weight, unpack_weight

    def unpacked(numbers: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
        return restored_weight(*unpack_weight(numbers, outputs, inputs, scheme), scheme)

    def own(weight: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return (weight.transpose(-1, -2) if turned else weight).to(like.dtype).contiguous().clone()

    *_, outputs, inputs = (sources[0].mT if turned else sources[0]).shape
    if sources[0].dim() == 3:
        return [own(torch.stack([unpacked(matrix, outputs, inputs) for matrix in held]), sources[0])]
    rows = [weight.shape[1 if turned else 0] for weight in sources]
    parts = unpacked(held, sum(rows), inputs).split(rows)
    return [own(part, weight) for part, weight in zip(parts, sources, strict=True)]


def rounded_tables(rows: list[RoundedRow]) -> str:
    """Counts, reasons, and the table of all rows."""
    counts = Counter(row.result for row in rows)
    lines = [f"{len(rows)} architectures: {', '.join(f'{n} {result}' for result, n in counts.most_common())}", ""]
    lines += ["| architecture | result | matrices | share of weights | median error | largest | reason |"]
    lines += ["|---|---|---:|---:|---:|---:|---|"]
    for row in rows:
        errors = ["" if x is None else f"{x:.1e}" for x in (row.median, row.largest)]
        reason = row.reason.replace("|", "\\|") or (row.dropped_passes and f"without {row.dropped_passes}")
        cells = (row.name, row.result, str(row.matrices), f"{row.share:.0%}", *errors, reason)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
