"""The process that renders: killed, crowded, orphaned."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import psutil
import pytest

from torch_pagoda.serving.page.markdown_process import MarkdownRenderer, RenderBusy, RenderFailed


def test_a_process_that_was_killed_is_begun_again():
    async def ask():
        before = await renderer.render(["a"])
        renderer._process.kill()
        renderer._process.wait()
        return before, await renderer.render(["a"])

    renderer = MarkdownRenderer()
    try:
        before, after = asyncio.run(ask())
    finally:
        renderer.close()
    assert before == after


def test_no_more_than_so_many_texts_wait():
    renderer = MarkdownRenderer(max_waiting=2)

    async def ask():
        return await asyncio.gather(*(renderer.render(["a"]) for _ in range(5)), return_exceptions=True)

    try:
        results = asyncio.run(ask())
    finally:
        renderer.close()
    assert [isinstance(result, RenderBusy) for result in results] == [False, False, True, True, True]


def test_closing_does_not_wait_for_a_text():
    renderer = MarkdownRenderer(seconds=60.0)

    async def ask():
        slow = asyncio.ensure_future(renderer.render(["![" * 90_000]))
        while renderer._process is None:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(renderer.close)
        with pytest.raises(RenderFailed):
            await slow

    began = time.monotonic()
    asyncio.run(ask())
    assert time.monotonic() - began < 30


def test_the_process_ends_with_the_one_that_began_it():
    program = """
import asyncio, os, signal
from torch_pagoda.serving.page.markdown_process import MarkdownRenderer
renderer = MarkdownRenderer()
asyncio.run(renderer.render(["a"]))
print(renderer._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    child = int(ran.stdout)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the process that renders outlived its server"
        time.sleep(0.02)
