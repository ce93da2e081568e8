"""Ranks of a launcher: forks of this process with torchrun's environment, found by a store over TCP."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import toy_ranks

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.parallel.channel import ChannelClosed
from torch_pagoda.runtime.parallel.facts import facts
from torch_pagoda.runtime.parallel.group import GroupFailed
from torch_pagoda.runtime.parallel.launch import Ranks
from torch_pagoda.runtime.parallel.messages import Message
from torch_pagoda.runtime.parallel.torchrun import EndsWithFirst, LaunchedRanks, Place, follow_first
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.restart_limit import RestartLimit

from toy_program import LAYERS, VOCAB, ToyProgram

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % VOCAB for j in range(length)] for i, length in enumerate((4, 37, 21))]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher of two ranks sets for rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))


def fork(function: Callable[[], Any]) -> int:
    """A fork of this process as rank 1; its exit status is 0 when the function returns."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ["RANK"] = "1"
        function()
        os._exit(0)
    finally:
        os._exit(9)


def follow_toy(**known: Any) -> None:
    follow_first(LaunchedRanks(Place.of_environment(), 30), toy_ranks.load_program, facts(1) | known)


@pytest.fixture
def ranks() -> Iterator[Callable[..., tuple[Ranks, int]]]:
    """Makes rank 0, and rank 1 beside it; both end."""
    made: list[tuple[Ranks, int]] = []

    def make(known: dict[str, Any], **theirs: Any) -> tuple[Ranks, int]:
        pid = fork(lambda: follow_toy(**theirs))
        launched = LaunchedRanks(Place.of_environment(), 30)
        ranks = Ranks(2, threads=1, launch=lambda: launched, restarts=RestartLimit(0), known=known)
        made.append((ranks, pid))
        return ranks, pid

    yield make
    for ranks, _ in made:
        ranks.close()


def engine(ranks: Ranks, **options: Any) -> Engine:
    windows = (0,) * LAYERS
    ranks.load(Message("load", {"windows": list(windows)}))
    program: Any = ranks.lead(toy_ranks.RankProgram(0, 2, windows))
    return Engine(program, block_size=4, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=16, **options)


def ended(pid: int) -> int:
    """The exit status of a fork."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_tokens_are_those_of_one_process_and_the_others_end_well(ranks):
    lead, pid = ranks({"model": "toy"}, model="toy")
    made = engine(lead)
    whole = ToyProgram(dtype=torch.float64)
    found = [list(output.outputs[0].token_ids) for output in made.generate(PROMPTS, GREEDY)]
    assert found == [whole.dense_greedy(prompt, 12) for prompt in PROMPTS]
    assert type(lead.group).__name__ == "HostGroup"
    made.shutdown()
    assert ended(pid) == 0


def test_they_meet_at_a_store_that_rank_0_opens(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR")
    launched = LaunchedRanks(place_of(0), 30, store=("127.0.0.1", 0))
    other = partial(LaunchedRanks, place_of(1), 30, store=launched.store)
    pid = fork(lambda: follow_first(other(), toy_ranks.load_program, facts(1)))
    made = engine(Ranks(2, threads=1, launch=lambda: launched))
    (output,) = made.generate(PROMPTS[:1], GREEDY)
    assert list(output.outputs[0].token_ids) == ToyProgram(dtype=torch.float64).dense_greedy(PROMPTS[0], 12)
    made.shutdown()
    assert ended(pid) == 0


def test_one_that_is_known_not_to_come_is_not_waited_for():
    def check() -> None:
        raise GroupFailed(1, "ended: it has no such module")

    launched = LaunchedRanks(place_of(0), 10, store=("127.0.0.1", 0))
    with pytest.raises(GroupFailed, match="rank 1 ended: it has no such module"):
        launched.start(check)
    launched.close()


def test_hosts_that_share_no_memory_use_tcp(ranks, monkeypatch):
    monkeypatch.setattr("torch_pagoda.runtime.parallel.torchrun.host_id", lambda: str(os.getpid()))
    lead, pid = ranks({})
    made = engine(lead)
    (output,) = made.generate(PROMPTS[:1], GREEDY)
    assert list(output.outputs[0].token_ids) == ToyProgram(dtype=torch.float64).dense_greedy(PROMPTS[0], 12)
    assert type(lead.group).__name__ == "TorchGroup"
    made.shutdown()
    assert ended(pid) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_is_named_and_not_started_again(ranks, number):
    lead, pid = ranks({})
    made = engine(lead)
    made.submit(PROMPTS[0], GREEDY)
    made.step()
    os.kill(pid, number)
    outputs: list[Any] = []
    while made.has_unfinished():
        outputs += made.step()
    error = outputs[-1].outputs[0].error
    assert error is not None and error.startswith(f"rank 1 (pid {pid}, host {socket.gethostname()}) ")
    assert ("was stopped" in error) == (number == signal.SIGSTOP)
    os.kill(pid, signal.SIGCONT)
    assert ended(pid) == (-signal.SIGKILL if number == signal.SIGKILL else 1)


def test_ranks_that_were_asked_for_something_else_are_refused(ranks):
    lead, pid = ranks({"model": "toy"}, model="another")
    with pytest.raises(GroupFailed, match="rank 1 has another model than rank 0: 'another', not 'toy'"):
        engine(lead)
    assert ended(pid) in (0, 1)


def test_ranks_that_no_child_process_is_have_no_store_of_blocks(ranks, tmp_path):
    """Ray's neither, which may be on other hosts, too."""
    lead, pid = ranks({})
    told = "kv_store: the ranks may be on several hosts, .*; use distributed_executor_backend='mp'"
    with pytest.raises(ValueError, match=told):
        engine(lead, kv_store=f"folder://{tmp_path}", swap_space=1 << 20, fingerprint=b"of this test")
    lead.close()
    assert ended(pid) == 0


def test_who_does_not_know_the_key_is_no_rank():
    """Neither one that comes, nor one that waits."""
    place = Place.of_environment()

    def others() -> None:
        launched = LaunchedRanks(place_of(1), 30)
        address, port, key = launched._get("rank 0's channel")
        with socket.create_connection((address, port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n" * 20)
        real = launched._get
        for wrong in ("00" * 32, key):
            launched._get = lambda name, wrong=wrong: [address, port, wrong]  # type: ignore[method-assign]
            if wrong != key:
                with pytest.raises(GroupFailed, match=r"rank 0 at .* does not answer"):
                    launched.join()
        launched._get = real  # type: ignore[method-assign]
        channel = launched.join()
        channel.send(Message("here", {}))
        with pytest.raises(ChannelClosed):
            channel.receive()

    pid = fork(others)
    launched = LaunchedRanks(place, 30)
    (worker,) = launched.start()
    assert (worker.rank, worker.pid) == (1, pid) and worker.channel.receive().kind == "here"
    worker.kill()
    launched.close()
    assert ended(pid) == 0


def place_of(rank: int) -> Place:
    return Place(rank, 2, 2)


def test_a_rank_that_does_not_come_is_named():
    pid = fork(lambda: LaunchedRanks(place_of(1), 30))
    launched = LaunchedRanks(place_of(0), 1.0)
    with pytest.raises(GroupFailed, match="rank 1 did not come within 1 s"):
        launched.start()
    launched.close()
    assert ended(pid) == 0


def test_one_that_waits_for_another_ends_soon_after_rank_0(monkeypatch):
    monkeypatch.setattr("torch_pagoda.runtime.parallel.torchrun._GRACE_SECONDS", 0.1)

    def waits() -> None:
        EndsWithFirst(LaunchedRanks(place_of(1), 30).join())
        threading.Event().wait()

    pid = fork(waits)
    launched = LaunchedRanks(place_of(0), 30)
    (worker,) = launched.start()
    time.sleep(0.1)
    worker.kill()
    launched.close()
    assert ended(pid) == 1


def test_without_a_launcher_it_says_so(monkeypatch):
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match=r"needs RANK, MASTER_PORT in the environment; start the script by torchrun"):
        Place.of_environment()
