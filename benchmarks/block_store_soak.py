"""Engines that share a store of blocks, in seeded rounds with faults, beside one without; status 1 on a mistake.

    python benchmarks/block_store_soak.py --rounds 200
    python benchmarks/block_store_soak.py --rounds 20 --only 'states*' --faults forged,dies --seed 7

A round has a kind of model (tiny, random, float32, compiled once), a fault and a conversation of two to four turns.
Its prompts begin alike. Each turn is served by new engines over the same folder: by one; by two behind a router; or
by one that computes the prompts and one that generates. Sizes are drawn: few blocks, so that sequences are preempted
by recomputation or swapping; small steps, so that prompts are cut into chunks; some engines run one step ahead.

Faults: the store is away, dies in the middle of an answer, is slow, is full, or does all of that and lies
("anything"). Or entries are cut, replaced by garbage or by those of another block, changed in one bit, sealed without
the secret, or missing: of a block in the middle, a group of layers, a head, a state's snapshot. Or the folder is full
of the blocks of another model, or of another fleet's secret, some of them under the names of ours. Or the engine that
computes prompts is lost.

Checked in every turn, "wrong" counts what is not so:

- every token is that of one engine without a store and without a prefix cache;
- a first prompt that runs alone takes no block from behind one that was damaged, in any group of layers, and with no
  fault at all what the turns before have stored;
- afterwards no block is used or lent, on the device or the host.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import itertools
import logging
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from block_store_faults import ENTRIES, STORES, Entry, FaultyStore, damage
from block_store_models import BLOCK_SIZE, KINDS, MAX_TOKENS, Model, compiled, greedy
from report import add_arguments, conditions, markdown_table, save

from torch_pagoda import SamplingParams
from torch_pagoda.runtime.block_store.entries import entry_key
from torch_pagoda.runtime.blocks.hashing import chain_start, extend_chain
from torch_pagoda.runtime.cache.cache_specs import has_state
from torch_pagoda.runtime.engine import cache_setup
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.serving.engine_process.pool_client import PoolClient
from torch_pagoda.serving.engine_process.wire import Submit

FOREIGN = ("another model's", "another secret's")
FAULTS = ("none", *STORES, "anything", *ENTRIES, *FOREIGN, "prefill lost")
OWN, MORE, TURNS = 40, 10, 4
"""Tokens below which a prompt has some behind what it shares, and a turn adds some to its answer; most turns."""
HOLD_SECONDS = 60.0
"""After which what is still lent to the store's threads is held for ever."""
HELD = ("blocks_used", "host_blocks_used", "state_slots_used", "running", "queue_length")
COUNTED = {
    "fetched": "kv_store_hits",
    "missed": "kv_store_misses",
    "failed": "kv_store_failed_loads",
    "damaged": "kv_store_damaged",
    "preempted": "preemptions",
}
"""Figure of a round → figure of ``Engine.stats``."""
FIGURES = ("rounds", "turns", "tokens", *COUNTED, "wrong")


@dataclass
class Round:
    """One conversation of one model over one folder with one fault.

    Attributes:
        model, fault: as drawn.
        draw: everything else.
        folder: of the store, its secrets beside it.
        figures: what happened.
        wrong: what was not as it has to be.
    """

    model: Model
    fault: str
    draw: random.Random
    folder: Path
    figures: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._store: Any = None  # that of the last engine, without what fails in front of it
        self._seal: Any = None
        self._heads: list[int] = []  # of each group
        self._state: int | None = None  # group
        self._bad: set[tuple[int, bytes]] = set()
        self._all_stored = True  # what was computed so far
        for name in ("own", "other"):
            key = self.folder / name
            key.write_bytes(self.draw.randbytes(32).hex().encode())
            key.chmod(0o600)

    def run(self) -> None:
        """All turns."""
        draw = self.draw
        shared = self._some(*self.model.shared)
        prompts = [
            [*shared[: draw.choice([0, len(shared) // 2, len(shared), len(shared)])], *self._some(2, OWN)]
            for _ in range(draw.randrange(3, 6))
        ]
        before = 0
        if self.fault in FOREIGN:
            self._fill_with_others(prompts)
        for turn in range(draw.randrange(2, TURNS + 1)):
            if turn and self.fault in ENTRIES:
                self._damage(draw.choice([prompts[0], prompts[0], draw.choice(prompts)]))
            answers = self._serve(prompts, before)
            right = self.model.right(prompts)
            for prompt, given, expected in zip(prompts, answers, right, strict=True):
                self.figures["tokens"] += len(expected)
                if given != expected:
                    self.violate(f"turn {turn}: {len(prompt)} tokens are continued by {given}, not {expected}")
            before = (len(prompts[0]) + MAX_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
            prompts = [
                [*prompt, *tokens, *self._some(2, MORE)] for prompt, tokens in zip(prompts, right, strict=True)
            ]
            self.figures["turns"] += 1
        self.figures["rounds"] += 1
        self.figures["wrong"] = len(self.wrong)

    def violate(self, what: str) -> None:
        self.wrong.append(what)

    def _some(self, least: int, below: int) -> list[int]:
        return [self.draw.randrange(3, 60) for _ in range(self.draw.randrange(least, below))]

    def _engine(self, prompts: Sequence[list[int]], **options: Any) -> Engine:
        """An engine over the folder, of drawn sizes, that has blocks for the longest prompt at least."""
        from stored_blocks import store_engine

        draw, least = self.draw, (max(map(len, prompts)) + MAX_TOKENS) // BLOCK_SIZE + 2
        waits = [0.0, 0.005, 0.2] if self.fault == "slow" else [30.0]
        drawn: dict[str, Any] = {
            "num_blocks": draw.choice([least, least * 3 // 2, least * 8]),
            "max_num_seqs": draw.choice([2, 8, 8]),
            "max_num_batched_tokens": draw.choice([8, 32, 128]),
            "preemption": draw.choice(["recompute", "swap"]),
            "async_scheduling": draw.random() < 0.3,
            "swap_space": (16 if has_state(self.model.program.caches) else 2) << 20,
            "kv_store_wait": draw.choice(waits),
            "kv_store_write": draw.choice(["all", "all", "all", "reused"]),
            "kv_store_key_file": str(self.folder / "own"),
            "fingerprint": self.model.fingerprints[0],
        }
        if self.fault == "full" and draw.random() < 0.5:
            drawn["kv_store_size"] = draw.randrange(20_000, 200_000)
        return store_engine(self.model.copy(), self.folder / "kv", **{**drawn, **options})

    @contextmanager
    def _stores(self) -> Iterator[None]:
        """Engines that are made meanwhile get stores that fail."""
        opened = cache_setup.open_block_store
        with mock.patch.object(cache_setup, "open_block_store", lambda *given: self._open(opened, *given)):
            yield

    def _open(self, opened: Any, *given: Any) -> Any:
        """Open a store, and put what fails in front of it."""
        from stored_blocks import FailingStore

        self._store, self._seal, own = opened(*given), given[1], self.draw.randrange(1 << 30)
        if self.fault == "anything":
            return FailingStore(self._store, own)
        return FaultyStore(self._store, self.fault, random.Random(own)) if self.fault in STORES else self._store

    def _serve(self, prompts: Sequence[list[int]], before: int) -> list[list[int]]:
        """The answers of new engines, which are checked and shut down. ``before`` tokens of the first prompt were
        computed in the last turn."""
        way = "apart" if self.fault == "prefill lost" else self.draw.choice(["one", "one", "routed", "apart"])
        with self._stores():
            engines = [self._engine(prompts) for _ in range(2 if way == "routed" else 1)]
            first = [self._engine(prompts, kv_store_write="all")] if way == "apart" else []
        try:
            if way == "one":
                answers = self._one(engines[0], prompts, before)
            else:
                answers = asyncio.run(self._several(engines, first, prompts))
            self._bad.clear()
            for engine in (*engines, *first):
                self._end(engine)
        finally:
            for engine in (*engines, *first):
                engine.shutdown()
        return answers

    def _one(self, engine: Engine, prompts: Sequence[list[int]], before: int) -> list[list[int]]:
        alone = []
        if self.draw.random() < 0.6:
            alone = engine.generate([prompts[0]], greedy())
            self._check_run(engine, prompts[0], alone[0].num_cached_tokens, before)
        outputs = [*alone, *engine.generate(prompts[len(alone) :], greedy())]
        return [list(output.outputs[0].token_ids) for output in outputs]

    async def _several(
        self, engines: Sequence[Engine], first: Sequence[Engine], prompts: Sequence[list[int]]
    ) -> list[list[int]]:
        """Through a pool of engines, of which ``first`` compute prompts."""
        from thread_client import ThreadClient

        from toy_client import read_all

        prefill = [ThreadClient(engine, reports_cache=True) for engine in first]
        decode = [ThreadClient(engine, reports_cache=True) for engine in engines]
        pool = PoolClient(decode, PoolClient(prefill) if prefill else None)
        await pool.start()
        try:
            await pool.wait_ready()
            params = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
            streams = [pool.submit(Submit(str(i), [prompt], params)) for i, prompt in enumerate(prompts)]
            reading = asyncio.gather(*map(read_all, streams))
            if self.fault == "prefill lost":
                await asyncio.sleep(self.draw.choice([0.0, 0.01, 0.05]))
                prefill[0]._lose("lost in this round")
            return [[token for delta in deltas for token in delta.token_ids] for deltas in await reading]
        finally:
            await pool.close()

    def _check_run(self, engine: Engine, prompt: list[int], cached: int, before: int) -> None:
        """Whether what was found of a prompt that ran alone ends before what was damaged."""
        if self.fault in FOREIGN and not before and cached:
            self.violate(f"{cached} tokens were found in others' blocks")
        hashes, manager = hashes_of(prompt), engine.block_manager
        for g, group in enumerate(manager.groups):
            run = cached // BLOCK_SIZE
            if behind := [i for i in range(group.first_seen(run, BLOCK_SIZE), run) if (g, hashes[i]) in self._bad]:
                self.violate(f"{cached} tokens were found, with blocks {behind} of group {g}, which are damaged")
        if self.fault == "none" and self._all_stored and not manager.has_state and cached < before:
            self.violate(f"{cached} tokens were found of the {before} that were stored")

    def _end(self, engine: Engine) -> None:
        """Check that an engine holds nothing, and count what it did."""
        from stored_blocks import traffic

        end = time.monotonic() + HOLD_SECONDS
        lent = engine.block_manager.swap_space.lent
        while (any(lent) or not engine.is_stored(engine.num_stored())) and time.monotonic() < end:
            engine.generate([[5, 6]], SamplingParams(max_tokens=1))  # what arrives is taken between steps
        try:
            engine.batcher.check()
        except RuntimeError as error:
            self.violate(str(error))
        stats = engine.stats()
        held = {name: stats[name] for name in HELD if stats.get(name)}
        if held or any(lent):
            self.violate(f"at the end of a turn there are still {held}, and lent {lent}")
        moved = traffic(engine)
        self._heads, groups = moved._reader._num_heads, engine.block_manager.groups
        self._state = next((g for g, group in enumerate(groups) if group.is_state), None)
        self._all_stored &= moved._stores_all and not stats["kv_store_dropped_writes"]
        for name, figure in COUNTED.items():
            self.figures[name] += int(stats[figure])

    def _fill_with_others(self, prompts: Sequence[list[int]]) -> None:
        """Store the blocks of another model, or of another secret, half of them under the names of ours, too."""
        with self._stores():
            ours = self._engine(prompts)
            own = self._store
            self._end(ours)
            if self.fault == "another model's":
                others = {"fingerprint": self.model.fingerprints[1]}
            else:
                others = {"kv_store_key_file": str(self.folder / "other")}
            with self.model.changed():
                engine = self._engine(prompts, kv_store_write="all", **others)
                engine.generate(list(prompts), greedy())
                self._end(engine)
                ours.shutdown()
                engine.shutdown()
        for prompt in prompts:
            for entry in self._entries(prompt):
                if self.draw.random() < 0.5:
                    path = own._file(entry.key)
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    path.write_bytes(entry.path.read_bytes())
                    path.chmod(0o600)
        self.figures.clear()

    def _damage(self, prompt: list[int]) -> None:
        """Damage entries of a prompt that the next engines get."""
        self._bad = damage(self.fault, self._entries(prompt), self._state, self._seal, self.draw)

    def _entries(self, prompt: list[int]) -> list[Entry]:
        """Those of a prompt that the folder has."""
        found = []
        for content, (group, heads) in itertools.product(hashes_of(prompt), enumerate(self._heads)):
            for head in range(heads):
                entry = Entry(content, group, head, self._store._file(entry_key(content, group, head)))
                if entry.path.exists():
                    found.append(entry)
        return found


def hashes_of(prompt: list[int]) -> list[bytes]:
    """Of the full blocks that an engine can find of a prompt."""
    hashes: list[bytes] = []
    extend_chain(hashes, prompt[:-1], 0, BLOCK_SIZE, chain_start(""))
    return hashes


def planned(kinds: Sequence[str], faults: Sequence[str], rounds: int, draw: random.Random) -> list[tuple[str, str]]:
    """Kind and fault of each round: all pairs in random order, again and again; those of a kind together."""
    pairs = [(kind, fault) for kind in kinds for fault in faults if fault != "a snapshot missing" or "states" in kind]
    found: list[tuple[str, str]] = []
    while len(found) < rounds:
        found += draw.sample(pairs, len(pairs))
    return sorted(found[:rounds], key=lambda pair: kinds.index(pair[0]))


def soak(
    model: Model,
    kind: str,
    faults: Sequence[tuple[int, str]],
    seed: int,
    figures: dict[tuple[str, str], Counter[str]],
) -> list[str]:
    """Run the rounds of a model, by their numbers; add to the figures, and return what was wrong."""
    wrong = []
    for number, fault in faults:
        with tempfile.TemporaryDirectory() as folder:
            one = Round(model, fault, random.Random(f"{seed} {kind} {number}"), Path(folder))
            try:
                one.run()
            except Exception as error:
                traceback.print_exc()
                one.violate(f"{type(error).__name__}: {error}")
                one.figures["wrong"] += 1
        figures.setdefault((kind, fault), Counter()).update(one.figures)
        for what in one.wrong:
            wrong.append(f"{kind}, {fault}, round {number}: {what}")
            print(f"WRONG {wrong[-1]}", flush=True)
    return wrong


def tables(figures: dict[tuple[str, str], Counter[str]]) -> str:
    """Sums by kind of model and by fault."""
    parts = []
    for which, (title, names) in enumerate({"model": KINDS, "fault": FAULTS}.items()):
        sums = {name: Counter[str]() for name in names}
        for pair, counts in figures.items():
            sums.setdefault(pair[which], Counter()).update(counts)
        sums = {name: counts for name, counts in sums.items() if counts}
        total = sum(sums.values(), Counter())
        rows = [[name, *(counts[figure] for figure in FIGURES)] for name, counts in {**sums, "all": total}.items()]
        parts.append(markdown_table([title, *FIGURES], rows))
    return "\n".join(parts)


def main() -> None:
    from stored_blocks import patience

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--only", default="*", help="kinds of models, as patterns with commas between them")
    parser.add_argument("--faults", default="*", help="likewise")
    add_arguments(parser)
    args = parser.parse_args()
    kinds, faults = chosen(KINDS, args.only), chosen(FAULTS, args.faults)
    torch.set_num_threads(1)
    logging.getLogger("torch_pagoda").setLevel(logging.CRITICAL)  # it warns of every fault
    rounds = list(enumerate(planned(kinds, faults, args.rounds, random.Random(args.seed))))
    figures: dict[tuple[str, str], Counter[str]] = {}
    wrong: list[str] = []
    with patience():
        for kind in kinds:
            begin = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                model = compiled(*KINDS[kind], Path(folder))
            compiling = time.perf_counter() - begin
            own = [(number, fault) for number, (of, fault) in rounds if of == kind]
            wrong += soak(model, kind, own, args.seed, figures)
            seconds = time.perf_counter() - begin - compiling
            print(f"{kind}: compiled in {compiling:.0f} s, {len(own)} rounds in {seconds:.0f} s", flush=True)
    text = tables(figures)
    print(f"\n{text}")
    result = {f"{kind}, {fault}": dict(counts) for (kind, fault), counts in figures.items()}
    save(args.out, "block_store_soak", {**conditions(1), "wrong": wrong, **result}, text)
    sys.exit(1 if wrong else 0)


def chosen(names: Iterable[str], patterns: str) -> list[str]:
    """The names that match one of the patterns."""
    return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(","))]


if __name__ == "__main__":
    main()
