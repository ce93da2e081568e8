"""Messages of rank 0 to the others: a header in JSON and the bytes of tensors. Nothing in them is executed."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from ..blocks import CacheCopy
from ..step_metadata import StepMetadata

Kind = Literal[
    "load",
    "count",
    "reserve",
    "bind",
    "host",
    "step",
    "copies",
    "discard",
    "warm_up",
    "here",
    "loaded",
    "failed",
]
"""Kinds of messages: the last three are a rank's answers."""

MAX_HEADER = 256 * 2**20
MAX_BYTES = 64 * 2**30

_KINDS = frozenset(get_args(Kind))
_PREFIX = struct.Struct("<4sIQ")
_MARK = b"PGR1"
_ALIGNMENT = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
_COPIES: tuple[Literal["move", "out", "in"], ...] = ("move", "out", "in")
_STEP_TENSORS = ("slot_mapping", "block_table", "query_start_loc", "seq_lens", "logits_rows", "token_lengths")


class TornMessage(RuntimeError):
    """What arrived is no message, or not all of one."""


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        kind: of it.
        values: what JSON can hold.
        tensors: any, on the host.
        number: the first of a sender is 1, each further one is one more; set by the channel.
    """

    kind: Kind
    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    number: int = 0


PREFIX_BYTES = _PREFIX.size


def encode(message: Message, number: int) -> bytes:
    """The bytes of a message.

    Raises:
        ValueError: a tensor has a dtype that messages do not carry.
    """
    listed: list[tuple[str, str, list[int]]] = []
    parts: list[Any] = []
    size = 0
    for name, tensor in message.tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ValueError(f"{name} is of {tensor.dtype}, which no message carries; convert it")
        listed.append((name, dtype, list(tensor.shape)))
        if tensor.numel():
            # A dim of size 1 counts as contiguous whatever its stride, which a view of bytes would refuse.
            flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
            parts += [bytes(-size % _ALIGNMENT), flat.view(torch.uint8).numpy().data]
            size += len(parts[-2]) + len(parts[-1])
    header = json.dumps([message.kind, number, message.values, listed], separators=(",", ":")).encode()
    return b"".join([_PREFIX.pack(_MARK, len(header), size), header, *parts])


def lengths(prefix: bytes | bytearray) -> tuple[int, int]:
    """Bytes of the header and of the tensors that follow a prefix of ``PREFIX_BYTES``.

    Raises:
        TornMessage: no message begins so.
    """
    mark, header, size = _PREFIX.unpack(prefix)
    if mark != _MARK or header > MAX_HEADER or size > MAX_BYTES:
        raise TornMessage(f"a message begins with {prefix[:16].hex()}")
    return header, size


def decode(header: bytes | bytearray, content: bytearray) -> Message:
    """The message of a header and the bytes behind it, which its tensors share.

    Raises:
        TornMessage: it is damaged.
    """
    try:
        kind, number, values, listed = json.loads(header)
        if kind not in _KINDS or type(number) is not int or not isinstance(values, dict):
            raise ValueError(f"a message of kind {kind!r}")
        tensors, start = {}, 0
        for name, dtype, shape in listed:
            if not isinstance(name, str) or not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"tensor {name!r} of shape {shape!r}")
            count, stored = math.prod(shape), _DTYPES[dtype]
            if not count:
                tensors[name] = torch.empty(shape, dtype=stored)
                continue
            start += -start % _ALIGNMENT
            if start + count * stored.itemsize > len(content):
                raise ValueError(f"tensor {name!r} of shape {shape!r} reaches beyond its {len(content)} bytes")
            tensors[name] = torch.frombuffer(content, dtype=stored, count=count, offset=start).view(shape)
            start += count * stored.itemsize
        if start != len(content):
            raise ValueError(f"{len(content) - start} bytes too many")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TornMessage(f"a message is damaged: {error}") from error
    return Message(kind, values, tensors, number)


@dataclass(frozen=True)
class Step:
    """A step that all ranks run.

    Attributes:
        input_ids: ``[1, T]`` int64.
        position_ids: the same.
        metadata: of the step.
        mode: how it is to run, see ``runtime.program.Program``.
        copies: copies of blocks that are made meanwhile.
        pending: tokens that only rank 0's device has yet; None where all are among ``input_ids``.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    metadata: StepMetadata
    mode: str = ""
    copies: Sequence[CacheCopy] = ()
    pending: Pending | None = None


@dataclass(frozen=True)
class Pending:
    """Tokens of a step that the step before it samples, and that stay on the device.

    Attributes:
        where: places among the ids, int64, on the host.
        sources: of each, the place among the tokens that were sampled.
        count: number of these.
    """

    where: torch.Tensor
    sources: torch.Tensor
    count: int


def step_message(step: Step) -> Message:
    """The message of a step; tensors of a device are copied to the host."""
    metadata = step.metadata
    tensors = {"input_ids": step.input_ids.cpu(), "position_ids": step.position_ids.cpu()}
    tensors |= {name: getattr(metadata, name) for name in _STEP_TENSORS}
    for group, (slots, table) in enumerate(metadata.groups, start=1):
        tensors |= {f"slot_mapping_{group}": slots, f"block_table_{group}": table}
    if metadata.state_read is not None and metadata.state_write is not None:
        tensors |= {"state_read": metadata.state_read, "state_write": metadata.state_write}
    if step.copies:
        tensors["copies"] = _copies_tensor(step.copies)
    values = {"mode": step.mode, "groups": len(metadata.groups)}
    if step.pending is not None:
        values["pending"] = step.pending.count
        tensors |= {"pending_where": step.pending.where, "pending_sources": step.pending.sources}
    return Message("step", values, tensors)


def step_of(message: Message) -> Step:
    """The step that a message holds.

    Raises:
        TornMessage: its sizes contradict each other.
    """
    tensors = message.tensors
    try:
        groups = tuple(
            (tensors[f"slot_mapping_{group}"], tensors[f"block_table_{group}"])
            for group in range(1, message.values["groups"] + 1)
        )
        metadata = StepMetadata(
            **{name: tensors[name] for name in _STEP_TENSORS},
            groups=groups,
            state_read=tensors.get("state_read"),
            state_write=tensors.get("state_write"),
        )
        ids, positions, mode = tensors["input_ids"], tensors["position_ids"], message.values["mode"]
        tokens, sequences = ids.shape[1], len(metadata.seq_lens)
        placed = [(metadata.slot_mapping, metadata.block_table), *groups]
        fits = (
            ids.shape == positions.shape == (1, tokens)
            and metadata.token_lengths.shape == (tokens,)
            and metadata.query_start_loc.shape == (sequences + 1,)
            and int(metadata.query_start_loc[-1]) <= tokens
            and all(slots.shape == (tokens,) and table.shape[0] == sequences for slots, table in placed)
            and all(x is None or x.shape == (sequences,) for x in (metadata.state_read, metadata.state_write))
            and isinstance(mode, str)
        )
    except (KeyError, TypeError, IndexError) as error:
        raise TornMessage(f"step {message.number} lacks {error}") from error
    if not fits:
        sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise TornMessage(f"the sizes of step {message.number} contradict each other: {sizes}")
    copies = _copies_of(tensors["copies"]) if "copies" in tensors else ()
    return Step(ids, positions, metadata, mode, copies, _pending_of(message, tokens))


def _pending_of(message: Message, tokens: int) -> Pending | None:
    count, tensors = message.values.get("pending"), message.tensors
    if count is None:
        return None
    if type(count) is not int:
        raise TornMessage(f"step {message.number} waits for {count!r} tokens")
    where, sources = tensors.get("pending_where"), tensors.get("pending_sources")
    for places, end in ((where, tokens), (sources, count)):
        is_list = places is not None and places.dim() == 1 and places.dtype is torch.int64 and places.numel()
        if not is_list or not 0 <= int(places.min()) <= int(places.max()) < end:  # type: ignore[union-attr]
            raise TornMessage(f"the tokens that step {message.number} waits for are none of its {tokens}")
    return Pending(where, sources, count)  # type: ignore[arg-type]


def copies_message(copies: Sequence[CacheCopy]) -> Message:
    """The message of copies that are made before anything else."""
    return Message("copies", tensors={"copies": _copies_tensor(copies)})


def copies_of(message: Message) -> list[CacheCopy]:
    """The copies that a message holds.

    Raises:
        TornMessage: they are none.
    """
    if "copies" not in message.tensors:
        raise TornMessage(f"message {message.number} has no copies")
    return _copies_of(message.tensors["copies"])


def _copies_tensor(copies: Sequence[CacheCopy]) -> torch.Tensor:
    return torch.tensor([(_COPIES.index(copy.where), *copy[1:]) for copy in copies], dtype=torch.int64)


def _copies_of(tensor: torch.Tensor) -> list[CacheCopy]:
    rows = tensor.tolist()
    if tensor.dim() != 2 or tensor.shape[1] != 4 or not all(0 <= row[0] < len(_COPIES) for row in rows):
        raise TornMessage(f"copies of shape {list(tensor.shape)} are none")
    return [CacheCopy(_COPIES[where], group, source, target) for where, group, source, target in rows]
