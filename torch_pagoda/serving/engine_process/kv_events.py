"""The changes of the prefix cache in vLLM's form, published over ZeroMQ for routers such as llm-d's and Dynamo's.

A message has three frames: the topic, its number (8 bytes, big-endian, from 0 on) and an ``EventBatch`` in msgpack.
A subscriber that missed some asks the replay socket for all from a number on; a batch of number -1 ends the answer.
Types and frames are those of vLLM's documentation ("KV Events Subscriber").
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.msgpack import Encoder

from ...runtime.batching.cache_events import BlocksRemoved, BlocksStored, CacheEvent
from ...runtime.requests.checks import check_bool, whole_number

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 100
_MEDIUM = "GPU"
"""vLLM's name for the cache that the model reads, whatever the device."""


class BlockStored(Struct, array_like=True, omit_defaults=True, tag=True):
    """Blocks that can be found from now on; fields as in vLLM."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = _MEDIUM
    lora_name: str | None = None


class BlockRemoved(Struct, array_like=True, omit_defaults=True, tag=True):
    """Blocks that can no longer be found; fields as in vLLM."""

    block_hashes: list[int]
    medium: str | None = _MEDIUM


class AllBlocksCleared(Struct, array_like=True, omit_defaults=True, tag=True):
    """No block can be found any more."""


class EventBatch(Struct, array_like=True, omit_defaults=True):
    """The events of a step; ``ts`` in seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@dataclass(frozen=True)
class KvEventsConfig:
    """The value of ``--kv-events-config``, with vLLM's keys and defaults.

    Attributes:
        enable_kv_cache_events: publish at all.
        publisher: "zmq", or "null" to publish nothing.
        endpoint: address to bind, such as ``tcp://*:5557``; the port grows by one for each further engine.
        replay_endpoint: the same for replays; None: none.
        buffer_steps: batches that can be replayed.
        hwm: batches that may wait for a slow subscriber; further ones are lost to it.
        max_queue_size: batches that may wait to be published; further ones are lost, and their numbers are missing.
        topic: first frame of each message.

    Raises:
        ValueError: a value is invalid.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        check_bool("enable_kv_cache_events", self.enable_kv_cache_events)
        if self.publisher not in (None, "zmq", "null"):
            raise ValueError(f"publisher={self.publisher!r} is not known; use 'zmq' or 'null'")
        for name in ("endpoint", "replay_endpoint"):
            address = getattr(self, name)
            if address is None and name == "replay_endpoint":
                continue
            if not isinstance(address, str) or not re.fullmatch(r"tcp://[^/\s]+:\d{1,5}|ipc://.+", address):
                raise ValueError(f"{name}={address!r} is no address; use one such as 'tcp://*:5557'")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            whole_number(name, getattr(self, name), 1, "use 1 or more")
        if not isinstance(self.topic, str):
            raise ValueError(f"topic={self.topic!r} is not text; use a string")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KvEventsConfig:
        """The configuration of a JSON object.

        Raises:
            ValueError: an unknown key or an invalid value.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"unknown keys {', '.join(unknown)}; use {', '.join(known)}")
        return cls(**values)

    @property
    def publishes(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"


class KvEventPublisher:
    """Publishes the events of one engine from a thread of its own, so that no step waits for a subscriber.

    Args:
        config: addresses and limits.
        block_size: tokens per block.
        data_parallel_rank: number of the engine, which its ports grow by.

    Raises:
        ValueError: an address cannot be bound.
    """

    def __init__(self, config: KvEventsConfig, block_size: int, data_parallel_rank: int = 0) -> None:
        import zmq

        self._block_size, self._rank = block_size, data_parallel_rank
        self._topic = config.topic.encode()
        self._queue: queue.Queue[tuple[int, float, Sequence[CacheEvent]] | None] = queue.Queue(config.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._number = 0
        self._encoder = Encoder()
        self._context = zmq.Context()
        self._publishing = self._context.socket(zmq.PUB)
        self._publishing.set_hwm(config.hwm)
        self._replaying: zmq.Socket[bytes] | None = None
        try:
            self._publishing.bind(address_of(config.endpoint, data_parallel_rank))
            if config.replay_endpoint is not None:
                self._replaying = self._context.socket(zmq.ROUTER)
                self._replaying.bind(address_of(config.replay_endpoint, data_parallel_rank))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(f"--kv-events-config: cannot bind {config.endpoint}: {error}; use another") from error
        self._thread = threading.Thread(target=self._run, name="pagoda-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Queue the events of a step. With a full queue they are lost, and subscribers see that a number is
        missing."""
        number, self._number = self._number, self._number + 1
        try:
            self._queue.put_nowait((number, time.time(), events))
        except queue.Full:
            logger.warning("KV events %d are lost: max_queue_size batches wait to be published", number)

    def close(self) -> None:
        """Publish what is queued and close the sockets."""
        self._queue.put(None)
        self._thread.join()
        self._context.destroy(linger=1000)

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_POLL_MS / 1000)
            except queue.Empty:
                self._answer()
                continue
            if item is None:
                return
            number, seconds, events = item
            batch = EventBatch(seconds, [self._in_wire_form(event) for event in events], self._rank)
            payload = self._encoder.encode(batch)
            self._kept.append((number, payload))
            self._publishing.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
            self._answer()

    def _answer(self) -> None:
        """Answer the waiting requests for replays."""
        import zmq

        while self._replaying is not None and self._replaying.poll(0):
            frames = self._replaying.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.warning("an invalid request for a replay of KV events was ignored")
                continue
            first = int.from_bytes(frames[2], "big")
            try:
                for number, payload in self._kept:
                    if number >= first:
                        self._replaying.send_multipart(
                            (frames[0], b"", number.to_bytes(8, "big"), payload), flags=zmq.NOBLOCK
                        )
                self._replaying.send_multipart((frames[0], b"", _END, b""), flags=zmq.NOBLOCK)
            except zmq.Again:
                logger.warning("a subscriber does not read its replay of KV events")

    def _in_wire_form(self, event: CacheEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
        if isinstance(event, BlocksStored):
            parent = None if event.parent is None else _number(event.parent)
            return BlockStored([_number(content) for content in event.hashes], parent, event.tokens, self._block_size)
        if isinstance(event, BlocksRemoved):
            return BlockRemoved([_number(content) for content in event.hashes])
        return AllBlocksCleared()


def address_of(endpoint: str, rank: int) -> str:
    """The address of one engine: the port grows with its number, of ``ipc`` the name, as in vLLM."""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def _number(content: bytes) -> int:
    """A block's hash as vLLM sends it by default: its last 64 bits."""
    return int.from_bytes(content[-8:], "big")
