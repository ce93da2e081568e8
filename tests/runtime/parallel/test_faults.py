"""A rank that ends, stops, raises or hears nonsense, wherever it is: a named error, and nothing is left of others.

Times are those of how soon an end or a stop is seen; none is measured.
"""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_ranks

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.ops.native import kernel_function
from torch_pagoda.runtime.parallel.group import GroupFailed
from torch_pagoda.runtime.parallel.leader import LeaderProgram
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.restart_limit import RestartLimit
from torch_pagoda.serving.engine_process.worker import Worker

from toy_program import VOCAB, ToyProgram

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % VOCAB for j in range(length)] for i, length in enumerate((4, 37, 21, 9, 30))]
SWAPPING = {"num_blocks": 19, "preemption": "swap", "swap_space": 1 << 20}


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forks of this process: what happens to them costs no start of an interpreter."""
    monkeypatch.setattr("torch_pagoda.runtime.parallel.launch.start_workers", toy_ranks.fork_workers)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process, descriptor or thread more than before; ranks have no files."""
    kernel_function("pagoda_shared_all_reduce")  # keeps its library's file open
    gc.collect()
    before = _descriptors(), threading.active_count(), _children()
    yield
    gc.collect()
    assert (_descriptors(), threading.active_count(), _children()) == before


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _children() -> set[int]:
    """Child processes of this one, also those that nobody has waited for."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def engine(program: LeaderProgram, **options: Any) -> Engine:
    settings = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, **options}
    return Engine(program, **settings)


def expected() -> list[list[int]]:
    whole = ToyProgram(dtype=torch.float64)
    return [whole.dense_greedy(prompt, 12) for prompt in PROMPTS]


def failure_of(fault: tuple[str, int, str], size: int = 2, **sizes: Any) -> str:
    """What requests, or the start, end with."""
    try:
        program = toy_ranks.start(size, load={"fault": fault}, restarts=RestartLimit(0))
    except GroupFailed as error:
        return str(error)
    try:
        made = engine(program, **sizes)
        outputs = made.generate(PROMPTS, GREEDY)
        (told,) = {output.outputs[0].error for output in outputs if output.outputs[0].finish_reason == "error"}
        with pytest.raises(RuntimeError) as raised:
            made.submit(PROMPTS[0], GREEDY)
        assert str(raised.value) == told
        return str(told)
    except GroupFailed as error:
        return str(error)
    finally:
        program.close()


FAULTS = [
    (("load", 1, "raise"), r"rank 1 \(pid \d+\) failed (in|after) loading: ValueError: no load today"),
    (("step", 5, "kill"), r"rank 1 \(pid \d+\) died with signal 9 in step 5"),
    (("step", 5, "stop"), r"rank 1 \(pid \d+\) was stopped in step 5"),
    (("load", 1, "kill"), r"rank 1 \(pid \d+\) died with signal 9 (in|after) loading"),
    (("load", 1, "exit"), r"rank 1 \(pid \d+\) ended with status 3 (in|after) loading"),
    (("load", 1, "stop"), r"rank 1 \(pid \d+\) was stopped (in|after) loading"),
    (("reserve", 1, "kill"), r"rank 1 \(pid \d+\) died with signal 9 in reserve"),
    (("reserve", 1, "raise"), r"rank 1 \(pid \d+\) failed in reserve: ValueError: no reserve today"),
    (("reserve", 1, "stop"), r"rank 1 \(pid \d+\) was stopped in reserve"),
    (("bind", 1, "kill"), r"rank 1 \(pid \d+\) died with signal 9 in bind"),
    (("bind", 1, "raise"), r"rank 1 \(pid \d+\) failed in bind: ValueError: no bind today"),
    (("bind", 1, "stop"), r"rank 1 \(pid \d+\) was stopped in bind"),
    (("step", 5, "raise"), r"rank 1 \(pid \d+\) failed in step 5: ValueError: no step today"),
    (("step", 5, "exit"), r"rank 1 \(pid \d+\) ended with status 3 in step 5"),
    (("copies", 2, "kill"), r"rank 1 \(pid \d+\) died with signal 9 (in|after) (step \d+|copies)"),
    (("copies", 2, "raise"), r"rank 1 \(pid \d+\) failed (in|after) (step \d+|copies): ValueError: no copies today"),
    (("copies", 2, "stop"), r"rank 1 \(pid \d+\) was stopped in (step \d+|copies)"),
]


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("fault, told", FAULTS, ids=str)
def test_a_rank_that_fails_is_named(fault, told):
    found = failure_of(fault, **(SWAPPING if fault[0] == "copies" else {}))
    assert re.fullmatch(told, found), found


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("what", ["kill", "raise", "stop"])
def test_of_four_ranks_the_culprit_is_named(what):
    """Those that wait for it fail, too."""
    told = failure_of(("step", 3, what), 4)
    assert re.match(r"rank 3 \(pid \d+\) (died with signal 9|failed|was stopped) in step 3", told), told


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("what", ["kill", "raise", "stop", "exit"])
def test_whatever_happens_at_the_end_they_end(what):
    program = toy_ranks.start(load={"fault": ("end", 1, what)})
    made = engine(program)
    (output,) = made.generate(PROMPTS[:1], GREEDY)
    assert list(output.outputs[0].token_ids) == expected()[0]
    made.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        made.submit(PROMPTS[0], GREEDY)


def test_requests_go_on_when_a_rank_was_killed(tmp_path):
    once = tmp_path / "once"
    once.touch()
    program = toy_ranks.start(load={"fault": ("step", 9, "kill"), "once": str(once)})
    try:
        made = engine(program)
        outputs = made.generate(PROMPTS, GREEDY)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected()
        assert made.stats()["rank_restarts"] == 1
        assert not once.exists()
    finally:
        program.close()


def test_an_idle_rank_that_was_killed_is_replaced_before_the_next_request():
    program = toy_ranks.start()
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=Worker(made := engine(program), theirs).run)
    thread.start()
    try:
        (killed,) = program._ranks.pids
        os.kill(killed, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while not made.stats()["rank_restarts"] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert made.stats()["rank_restarts"] == 1
    finally:
        ours.close()
        thread.join(60)
        program.close()


@pytest.mark.usefixtures("forks")
def test_torn_messages_end_the_group_by_name():
    for garbage, told in [
        (b"GET / HTTP/1.1\r\n" * 4, "TornMessage: a message begins with"),
        (b"PGR1" + (9).to_bytes(4, "little") + bytes(8) + b"[]       ", "TornMessage: a message is damaged"),
    ]:
        program = toy_ranks.start(restarts=RestartLimit(0))
        try:
            made = engine(program)
            made.submit(PROMPTS[0], GREEDY)
            made.step()
            program._ranks._watch.workers[0].channel.send_bytes(garbage)
            outputs: list[Any] = []
            while made.has_unfinished():
                outputs += made.step()
            assert told in outputs[-1].outputs[0].error and outputs[-1].outputs[0].error.startswith("rank 1 (pid")
        finally:
            program.close()


@pytest.mark.usefixtures("forks")
def test_ranks_that_nobody_has_any_more_end():
    program = toy_ranks.start()
    made = engine(program)
    del program, made
    gc.collect()


@pytest.mark.usefixtures("forks")
def test_ranks_that_would_compute_otherwise_are_refused(monkeypatch):
    monkeypatch.setattr("torch_pagoda.runtime.parallel.launch.facts", lambda threads: {"processor": os.getpid()})
    with pytest.raises(GroupFailed, match=r"rank 1 has another processor than rank 0: .*, not \d+"):
        toy_ranks.start()


@pytest.mark.slow
def test_a_command_that_is_none_is_an_error():
    with pytest.raises(FileNotFoundError):
        toy_ranks.Ranks(2, command=("/no/such/program",))
    ranks = toy_ranks.Ranks(2, command=(sys.executable, "-c", "raise SystemExit(4)"))
    with pytest.raises(GroupFailed, match=r"rank 1 \(pid \d+\) ended with status 4 "):
        ranks.load(toy_ranks.Message("load", {}))
    ranks.close()


_LEADER = """
import sys, os, signal
sys.path.insert(0, {support!r})
import toy_ranks
program = toy_ranks.start({size})
print(*program._ranks.pids, flush=True)
if {stops}:
    os.kill(program._ranks.pids[0], signal.SIGSTOP)
signal.pause()
"""


@pytest.mark.parametrize("stops", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_end_with_rank_0(stops):
    code = _LEADER.format(support=str(Path(toy_ranks.__file__).parent), size=2, stops=stops)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        pids = list(map(int, leader.stdout.readline().split()))
        assert len(pids) == 1 and _is_alive(pids[0])
        leader.kill()
    deadline = time.monotonic() + 20
    while any(map(_is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_is_alive, pids))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("ahead", [False, True])
def test_ranks_that_are_killed_at_random_change_no_token(ahead):
    drawn = random.Random(3)
    program = toy_ranks.start(3 - 1, restarts=RestartLimit(100))
    try:
        made = engine(program, async_scheduling=ahead, **SWAPPING)
        wanted, killed = expected(), 0
        while killed < 10:
            asked = {made.submit(prompt, GREEDY): tokens for prompt, tokens in zip(PROMPTS, wanted, strict=True)}
            found: dict[str, list[int]] = {}
            at = drawn.randrange(25)
            while made.has_unfinished():
                if not at and killed < 10:
                    killed += 1
                    os.kill(program._ranks.pids[0], drawn.choice([signal.SIGKILL, signal.SIGTERM]))
                at -= 1
                for output in made.step():
                    assert output.outputs[0].error is None
                    found[output.request_id] = list(output.outputs[0].token_ids)
            assert found == asked
        assert made.stats()["rank_restarts"] == killed
    finally:
        program.close()
