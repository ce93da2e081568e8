"""Exchanges of a group of ranks, which each rank compares with what it makes of all ranks' numbers by itself.

``python -m torch_pagoda.npu_tools.selftest.collectives`` is one of the other ranks, see ``torch_pagoda.rank``.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ...rank import main

if TYPE_CHECKING:
    from ...runtime.parallel.group import RankGroup
    from ...runtime.parallel.messages import Message

__all__ = ["COMMAND", "Case", "cases", "exchange", "take_part"]

COMMAND = (sys.executable, "-P", "-m", "torch_pagoda.npu_tools.selftest.collectives")
_DTYPES = ("float32", "float16", "bfloat16")
_ROUNDS = 5
_LARGEST = 4
"""Of the integers whose sum is exact in each dtype, up to 64 ranks."""


@dataclass(frozen=True)
class Case:
    """An exchange.

    Attributes:
        kind: one of ``rank_items.KINDS``.
        dtype: of the numbers.
        rows, width: sizes of each rank's tensor.
    """

    kind: str
    dtype: str
    rows: int
    width: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.dtype}[{self.rows}, {self.width}]"


def cases(kind: str, hidden_size: int, rows: tuple[int, ...]) -> list[Case]:
    """Those of a model: sums and parts of rows of its hidden size; sampled tokens.

    Args:
        kind: one of ``rank_items.KINDS``.
        hidden_size: of the model.
        rows: numbers of tokens in a step.
    """
    if kind == "broadcast":
        return [Case(kind, "int64", 1, count) for count in rows]
    return [Case(kind, dtype, count, hidden_size) for dtype in _DTYPES for count in rows]


def take_part(message: Message, group: RankGroup) -> Any:
    """As another rank, do the exchanges that rank 0 does; what a rank runs afterwards: nothing."""
    device: torch.device = getattr(group, "device", torch.device("cpu"))
    for case in message.values["cases"]:
        exchange(Case(**case), group, device)
    return SimpleNamespace(vocab_size=0, device=torch.device("cpu"))


def exchange(case: Case, group: RankGroup, device: torch.device) -> dict[str, Any]:
    """One exchange, with its time on this rank; all ranks call it and get the same reasons.

    Returns:
        JSON data; its "wrong" is the reason why it is wrong, or "".
    """
    compared = _broadcasts(case, group, device) if case.kind == "broadcast" else _compared(case, group, device)
    own = _numbers(case, group.rank).to(device)
    run: Callable[[], torch.Tensor] = {
        "all_reduce": lambda: group.all_reduce(own),
        "all_gather": lambda: group.all_gather(own),
        "broadcast": lambda: group.broadcast(own, 0),
    }[case.kind]
    seconds = statistics.median(_seconds(run, device) for _ in range(_ROUNDS))
    return {
        **asdict(case),
        **compared,
        "bytes": own.nbytes,
        "microseconds": round(1e6 * seconds, 1),
        "gigabytes_per_second": round(own.nbytes / max(seconds, 1e-9) / 1e9, 4),
    }


def _compared(case: Case, group: RankGroup, device: torch.device) -> dict[str, Any]:
    """A sum or a gathering of integers, whose sums are exact in any order, and of random numbers."""
    run = group.all_reduce if case.kind == "all_reduce" else group.all_gather
    integers = [_integers(case, rank) for rank in range(group.size)]
    numbers = [_numbers(case, rank) for rank in range(group.size)]
    exact = run(integers[group.rank].to(device)).cpu()
    found, again = (run(numbers[group.rank].to(device)).cpu() for _ in range(2))
    if case.kind == "all_gather":
        is_exact = torch.equal(exact, torch.cat(integers, -1)) and torch.equal(found, torch.cat(numbers, -1))
        return {"wrong": _first(group, (("did not get what the ranks sent", is_exact),))}
    expected, most = _sums(numbers)
    off = (found.double() - expected).abs()
    repeats = torch.equal(found, again)
    reason = _first(
        group,
        (
            ("has another sum of integers than the exact one", torch.equal(exact, sum(integers[1:], integers[0]))),
            ("has a sum that is off by more than its roundings", bool((off <= group.size * most).all())),
            ("has other bits than rank 0", _digest(found) == _of_first(group, _digest(found))),
            (
                "has other bits a second time, with HCCL_DETERMINISTIC",
                repeats or os.environ.get("HCCL_DETERMINISTIC", "").lower() not in ("true", "strict"),
            ),
        ),
    )
    in_order = torch.equal(found, _in_order(numbers))
    return {
        "wrong": reason,
        "repeats": not _any(group, not repeats),
        "in_order": not _any(group, not in_order),
    }


def _broadcasts(case: Case, group: RankGroup, device: torch.device) -> dict[str, Any]:
    """From each rank."""
    sent = [_integers(case, rank) for rank in range(group.size)]
    got = [group.broadcast(sent[group.rank].to(device), source).cpu() for source in range(group.size)]
    return {"wrong": _first(group, (("did not get what a rank sent", all(map(torch.equal, got, sent))),))}


def _first(group: RankGroup, checks: tuple[tuple[str, bool], ...]) -> str:
    """The first reason of any rank, by its name."""
    for reason, is_right in checks:
        odd = group.agree(-1 if is_right else group.rank, "max")
        if odd >= 0:
            return f"rank {odd} {reason}"
    return ""


def _any(group: RankGroup, here: bool) -> bool:
    return group.agree(int(here), "max") == 1


def _of_first(group: RankGroup, value: int) -> int:
    """The value of rank 0, which is not negative."""
    return group.agree(value if group.rank == 0 else 0, "max")


def _digest(x: torch.Tensor) -> int:
    return int.from_bytes(hashlib.blake2b(x.contiguous().view(torch.uint8).numpy().data, digest_size=7).digest())


def _sums(parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums, and what one rounding in the dtype of the parts may add to an error, in float64."""
    sums = torch.zeros(parts[0].shape, dtype=torch.float64)
    sizes = torch.zeros_like(sums)
    for part in parts:
        sums += part.double()
        sizes += part.double().abs()
    return sums, sizes * torch.finfo(parts[0].dtype).eps / 2


def _in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum as ranks on CPUs have it: in the order of the ranks, in float32."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def _integers(case: Case, rank: int) -> torch.Tensor:
    """``[rows, width]``, the same on every rank that asks for them."""
    generator = torch.Generator().manual_seed(rank)
    drawn = torch.randint(-_LARGEST, _LARGEST + 1, (case.rows, case.width), generator=generator)
    return drawn.to(getattr(torch, case.dtype))


def _numbers(case: Case, rank: int) -> torch.Tensor:
    """``[rows, width]``, likewise."""
    if case.dtype == "int64":
        return _integers(case, rank)
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(case.rows, case.width, generator=generator).to(getattr(torch, case.dtype))


def _seconds(run: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Until the device has finished."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    began = time.perf_counter()
    run()
    if module is not None:
        module.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], lambda: take_part))
