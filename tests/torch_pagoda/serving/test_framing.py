from __future__ import annotations

import random
import socket

import pytest

from torch_pagoda.serving.engine_process.framing import FrameReader, FrameTooLong, FrameWriter


def framed(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "big") + frame


def test_frames_come_out_whole_however_they_are_cut() -> None:
    random.seed(0)
    frames = [random.randbytes(random.choice([0, 1, 3, 4, 5, 300])) for _ in range(60)]
    data = b"".join(map(framed, frames))
    for most in (1, 2, 7, 100, len(data)):
        reader, found, at = FrameReader(), [], 0
        while at < len(data):
            size = random.randint(1, most)
            found += reader.feed(data[at : at + size])
            at += size
        assert found == frames


def test_a_frame_that_says_it_is_too_long_is_refused_before_it_is_read() -> None:
    reader = FrameReader(max_frame=10)
    assert list(reader.feed(framed(b"x" * 10))) == [b"x" * 10]
    with pytest.raises(FrameTooLong, match="a frame of 11 bytes"):
        list(reader.feed((11).to_bytes(4, "big")))
    with pytest.raises(FrameTooLong, match="4294967295"):
        list(FrameReader().feed(b"\xff" * 4))
    with pytest.raises(FrameTooLong, match="cannot send"):
        FrameWriter(max_frame=10).put(b"x" * 11)


def test_what_a_socket_does_not_take_waits() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        writer, reader = FrameWriter(), FrameReader()
        frames = [random.randbytes(100_000) for _ in range(30)]
        for frame in frames:
            writer.put(frame)
        assert writer.num_unsent == 30 * 100_004
        found: list[bytes] = []
        while writer.num_unsent:
            before = writer.num_unsent
            assert writer.send(ours)
            assert writer.num_unsent < before
            new, is_open = reader.receive(theirs)
            assert is_open
            found += new
        new, _ = reader.receive(theirs)
        assert found + new == frames


def test_the_other_side_is_gone() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        theirs.sendall(framed(b"last words"))
        theirs.close()
        reader = FrameReader()
        frames, is_open = reader.receive(ours)
        if is_open:
            more, is_open = reader.receive(ours)
            frames += more
        assert frames == [b"last words"] and not is_open
        writer = FrameWriter()
        writer.put(b"anybody?")
        assert not writer.send(ours)
