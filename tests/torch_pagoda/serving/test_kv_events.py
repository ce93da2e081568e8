"""vLLM's KV events, read by a subscriber with the types of vLLM's documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from torch_pagoda.runtime.batching.cache_events import AllBlocksCleared, BlocksRemoved, BlocksStored
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.serving.engine_process.kv_events import KvEventPublisher, KvEventsConfig, address_of

from toy_client import toy_engine
from toy_program import ToyProgram


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """As documented."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllCleared(KVCacheEvent, tag="AllBlocksCleared"):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


@pytest.fixture
def addresses(tmp_path: Any) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def replay(context: zmq.Context[Any], address: str, first: int) -> dict[int, KVEventBatch]:
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    found = {}
    while True:
        assert socket.poll(20_000)
        _, number, payload = socket.recv_multipart()
        if int.from_bytes(number, "big", signed=True) < 0:
            return found
        found[int.from_bytes(number, "big")] = DECODER.decode(payload)


def test_a_subscriber_follows_and_gets_what_it_missed(context: zmq.Context[Any], addresses: tuple[str, str]) -> None:
    events, replays = addresses
    config = KvEventsConfig(True, endpoint=events, replay_endpoint=replays, buffer_steps=3, topic="kv")
    publisher = KvEventPublisher(config, block_size=2, data_parallel_rank=0)
    try:
        publisher.publish([BlocksStored([b"\0" * 15 + b"\1", b"\0" * 15 + b"\2"], None, [5, 6, 7, 8])])
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt_string(zmq.SUBSCRIBE, "kv")
        subscriber.connect(events)
        number = 0
        while not subscriber.poll(50):  # a subscription takes a moment
            number += 1
            publisher.publish([BlocksRemoved([b"\1" * 16])])
        topic, _, payload = subscriber.recv_multipart()
        batch = DECODER.decode(payload)
        assert topic == b"kv" and batch.events == [BlockRemoved([0x0101010101010101], "GPU")]
        assert batch.data_parallel_rank == 0
        publisher.publish([AllBlocksCleared()])
        publisher.publish([BlocksStored([b"\0" * 15 + b"\3"], b"\0" * 15 + b"\2", [9, 9])])
        last = number + 2
        found = replay(context, replays, 0)
        while last not in found:  # the thread publishes a moment later
            found = replay(context, replays, 0)
        assert sorted(found) == [last - 2, last - 1, last], "the last three"
        assert found[last].events == [BlockStored([3], 2, [9, 9], 2, None, "GPU", None)]
        assert found[last - 1].events == [AllCleared()]
        assert sorted(replay(context, replays, last)) == [last]
    finally:
        publisher.close()


def test_the_tokens_of_an_engine_are_in_the_events() -> None:
    engine = toy_engine(ToyProgram(vocab_size=258), enable_prefix_caching=True)
    collected = engine.watch_prefix_cache(with_tokens=True)
    prompt = list(range(1, 11))
    output = engine.generate([prompt], SamplingParams(max_tokens=7, ignore_eos=True))[0].outputs[0]
    stored = [event for event in collected.take() if isinstance(event, BlocksStored)]
    tokens = [token for event in stored for token in event.tokens]
    assert tokens == [*prompt, *output.token_ids][: len(tokens)] and len(tokens) == 16
    assert stored[0].parent is None and all(event.parent for event in stored[1:])
    engine.shutdown()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enable": True}, "unknown keys enable"),
        ({"endpoint": "localhost"}, "endpoint='localhost' is no address"),
        ({"publisher": "kafka"}, "publisher='kafka' is not known"),
        ({"hwm": 0}, "hwm=0"),
        ({"topic": 3}, "topic=3"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events=1"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KvEventsConfig.from_dict(values)


def test_an_address_in_use_is_refused(context: zmq.Context[Any]) -> None:
    socket = context.socket(zmq.REP)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(ValueError, match="cannot bind"):
        KvEventPublisher(KvEventsConfig(True, endpoint=f"tcp://127.0.0.1:{port}"), 4)


def test_nothing_is_published_unless_it_is_asked_for() -> None:
    assert KvEventsConfig(True).publishes
    assert not KvEventsConfig().publishes and not KvEventsConfig(True, "null").publishes


def test_engines_have_addresses_of_their_own() -> None:
    assert address_of("tcp://*:5557", 2) == "tcp://*:5559" and address_of("tcp://*:5557", 0) == "tcp://*:5557"
    assert address_of("ipc:///run/kv", 1) == "ipc:///run/kv_dp1"
