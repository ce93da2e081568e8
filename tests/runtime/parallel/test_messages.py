"""Messages between ranks: what is sent arrives, and nothing damaged is taken for a message."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from torch_pagoda.runtime.blocks import CacheCopy
from torch_pagoda.runtime.parallel.channel import Channel, ChannelClosed
from torch_pagoda.runtime.parallel.messages import (
    PREFIX_BYTES,
    Message,
    Pending,
    Step,
    TornMessage,
    copies_message,
    copies_of,
    decode,
    encode,
    lengths,
    step_message,
    step_of,
)
from torch_pagoda.runtime.step_metadata import StepMetadata

COPIES = [CacheCopy("out", 1, 3, 0), CacheCopy("in", 0, 0, 5), CacheCopy("move", 0, 2, 1)]


def make_step(tokens: int = 5, sequences: int = 2, *, groups: int = 2, has_state: bool = True) -> Step:
    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, 9, shape, dtype=dtype)

    bounds = torch.tensor([0, *range(tokens - sequences + 1, tokens + 1)], dtype=torch.int32)
    slots = [numbers(sequences, dtype=torch.int32) if has_state else None for _ in range(2)]
    placed = tuple((numbers(tokens), numbers(sequences, 3 + group, dtype=torch.int32)) for group in range(1, groups))
    metadata = StepMetadata(
        numbers(tokens),
        numbers(sequences, 6, dtype=torch.int32)[:, ::2],
        bounds,
        numbers(sequences, dtype=torch.int32),
        numbers(sequences),
        numbers(tokens),
        placed,
        *slots,
    )
    return Step(numbers(1, tokens), numbers(1, tokens), metadata, "graph of 8", COPIES)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel, socket.socket]]:
    """Two ends, and the socket of the first."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), Channel(theirs), ours


def sent(message: Message) -> Message:
    encoded = encode(message, 7)
    header, size = lengths(encoded[:PREFIX_BYTES])
    assert len(encoded) == PREFIX_BYTES + header + size
    return decode(encoded[PREFIX_BYTES : PREFIX_BYTES + header], bytearray(encoded[PREFIX_BYTES + header :]))


@pytest.mark.parametrize("groups, has_state", [(1, False), (3, False), (1, True), (2, True)])
def test_steps_arrive(groups, has_state):
    step = make_step(groups=groups, has_state=has_state)
    found = step_of(sent(step_message(step)))
    assert found.mode == step.mode and found.copies == step.copies
    assert torch.equal(found.input_ids, step.input_ids) and torch.equal(found.position_ids, step.position_ids)
    for name, expected in vars(step.metadata).items():
        got = getattr(found.metadata, name)
        if isinstance(expected, torch.Tensor):
            assert got.dtype is expected.dtype and torch.equal(got, expected), name
        elif name == "groups":
            assert len(got) == len(expected) == groups - 1
            for pair, other in zip(got, expected, strict=True):
                assert all(map(torch.equal, pair, other))


def test_tensors_of_all_kinds_arrive():
    tensors = {
        "packed": torch.arange(12, dtype=torch.uint8).view(3, 4).t(),
        "half": torch.randn(5).bfloat16(),
        "small": torch.randn(3).to(torch.float8_e4m3fn),
        "none": torch.empty(0, 4),
        "one": torch.tensor(3.5),
        "stripe": torch.arange(8).view(2, 4)[:1, 1:2],
        "yes": torch.tensor([True, False]),
    }
    found = sent(Message("load", {"text": "ä\n", "number": 1 << 60, "list": [None, 0.5]}, tensors))
    assert found.kind == "load" and found.number == 7
    assert found.values == {"text": "ä\n", "number": 1 << 60, "list": [None, 0.5]}
    for name, expected in tensors.items():
        got = found.tensors[name]
        assert got.dtype is expected.dtype and got.shape == expected.shape
        assert got.tolist() == expected.tolist()
    with pytest.raises(ValueError, match="no message carries"):
        encode(Message("load", tensors={"z": torch.zeros(1, dtype=torch.complex64)}), 1)


def test_copies_arrive():
    assert copies_of(sent(copies_message(COPIES))) == COPIES


def test_no_damage_is_taken_for_a_message():
    """Whatever byte is another one, what arrives is a message of the same sizes, or refused by that name."""
    encoded = encode(step_message(make_step()), 7)
    header, _ = lengths(encoded[:PREFIX_BYTES])
    drawn = random.Random(0)
    refused = 0
    for _ in range(600):
        damaged = bytearray(encoded)
        damaged[drawn.randrange(PREFIX_BYTES + header)] = drawn.randrange(256)
        if drawn.random() < 0.3:
            del damaged[drawn.randrange(len(damaged)) :]
        try:
            lengths(bytes(damaged[:PREFIX_BYTES].ljust(PREFIX_BYTES, b"\0")))
            content = damaged[PREFIX_BYTES + header :]
            step = step_of(decode(damaged[PREFIX_BYTES : PREFIX_BYTES + header], content))
            assert step.input_ids.shape == step.position_ids.shape
        except TornMessage:
            refused += 1
    assert refused > 300


@pytest.mark.parametrize(
    "change, told",
    [
        ({"position_ids": torch.zeros(1, 4, dtype=torch.int64)}, "sizes of step 7 contradict each other"),
        ({"slot_mapping": torch.zeros(6, dtype=torch.int64)}, "contradict"),
        ({"block_table_1": torch.zeros(3, 2, dtype=torch.int32)}, "contradict"),
        ({"state_write": torch.zeros(3, dtype=torch.int32)}, "contradict"),
        ({"query_start_loc": torch.tensor([0, 4, 6], dtype=torch.int32)}, "contradict"),
        ({"copies": torch.zeros(4, dtype=torch.int64)}, "are none"),
        ({"copies": torch.tensor([[3, 0, 0, 0]])}, "are none"),
        ({"seq_lens": None}, "step 7 lacks 'seq_lens'"),
    ],
)
def test_steps_that_contradict_themselves_are_refused(change, told):
    message = step_message(make_step())
    tensors = {name: tensor for name, tensor in {**message.tensors, **change}.items() if tensor is not None}
    with pytest.raises(TornMessage, match=told):
        step_of(Message("step", message.values, tensors, 7))


def test_messages_are_numbered(ends):
    ours, theirs, sock = ends
    assert ours.send(Message("warm_up")) == 1
    assert theirs.receive() == Message("warm_up", number=1)
    sock.sendall(encode(Message("warm_up"), 3))
    with pytest.raises(TornMessage, match="message 3 follows message 1"):
        theirs.receive()


def test_an_end_is_no_message(ends):
    ours, theirs, sock = ends
    encoded = encode(copies_message(COPIES), 1)
    sock.sendall(encoded[:-5])
    ours.end()
    with pytest.raises(TornMessage, match="a message ends 5 bytes early"):
        theirs.receive()
    theirs.send(Message("warm_up"))
    assert ours.receive().kind == "warm_up"
    theirs.close()
    assert ours.has_news
    with pytest.raises(ChannelClosed):
        ours.receive()
    with pytest.raises(ChannelClosed):
        ours.send(Message("warm_up"))


def test_what_is_no_message_is_refused(ends):
    _, theirs, sock = ends
    sock.sendall(b"GET / HTTP/1.1\r\n")
    with pytest.raises(TornMessage, match="a message begins with 474554"):
        theirs.receive()


def test_tokens_that_a_step_waits_for_arrive_or_are_refused() -> None:
    pending = Pending(torch.tensor([1, 4]), torch.tensor([2, 0]), 3)
    found = step_of(sent(step_message(replace(make_step(), pending=pending)))).pending
    assert found is not None
    assert (found.where.tolist(), found.sources.tolist(), found.count) == ([1, 4], [2, 0], 3)
    for wrong in (
        replace(pending, count=2),
        replace(pending, where=torch.tensor([1, 5])),
        replace(pending, count=-1),
    ):
        with pytest.raises(TornMessage, match="are none of its 5"):
            step_of(sent(step_message(replace(make_step(), pending=wrong))))
