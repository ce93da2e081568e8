"""Speculative decoding: speed with and without drafts, sides in turns, and what acceptance and costs predict.

    python benchmarks/speculation.py examples/tiny-pydoc --parts methods --streams 1,8,32 \\
        --methods none,wrong,ngram,suffix,mtp,draft_model
    python benchmarks/speculation.py examples/tiny-pydoc --parts forced,recorded,repeated --rounds 3

Parts:

- ``methods``: held-out text continued greedily with each method, ``wrong`` being a drafter that is always wrong.
  Measured speed beside that which accepted drafts and measured costs of steps predict, and the share of drafts that
  were accepted, by position. Two engines of one kind differ by some per cent, as memory lies. So each engine is also
  compared with itself without drafts (``own``), on other prompts. ``mtp`` and ``draft_model`` take MODEL-mtp and
  MODEL-draft if these folders are there.
  Two workloads (``--workloads``): ``batch``, requests of one length that come at once, and whose speed is that of
  the slowest; ``clients``, each of which sends its next request when the last is answered, of unequal lengths.
- ``recorded``: recorded answers as drafts of one stream, 0.7 of them right: measured beside predicted.
- ``repeated``: requests that come again, with the suffix tree: steps.
- ``forced``: a schema of ten fields: steps and seconds with and without ``draft_forced_tokens``.

Only ratios of one run count; a machine with other load needs more ``--rounds``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import numpy as np
from drafters import Oracle, draft

import torch_pagoda as pagoda
from torch_pagoda.runtime.requests.outputs import RequestOutput
from torch_pagoda.runtime.speculation.config import LENGTHS
from torch_pagoda.runtime.speculation.drafting import ACCEPTED_BY_PLACE

HOME = Path(__file__).resolve().parent.parent
TEXTS = [HOME / "README.md", *sorted((HOME / "docs").glob("*.md"))]
REQUESTS_OF_A_CLIENT = 2
FIELDS = [
    *("first_name", "family_name", "date_of_birth", "place_of_birth", "nationality"),
    *("street_address", "postal_code", "city_of_residence", "telephone_number", "mail_address"),
]
SCHEMA = {
    "type": "object",
    "properties": {name: {"enum": ["yes", "no", "unknown"]} for name in FIELDS},
    "required": FIELDS,
    "additionalProperties": False,
}
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "wrong": {},
    "ngram": {
        "speculative_config": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    },
    "suffix": {"speculative_config": {"method": "suffix"}},
}


class Side:
    """A model with one way of drafting."""

    def __init__(self, name: str, given: argparse.Namespace, **options: Any) -> None:
        self.name = name
        self.clock = time.process_time if given.clock == "cpu" else time.perf_counter
        self.llm = pagoda.LLM(
            given.model,
            dtype=given.dtype,
            quantization=given.quantization,
            batch_invariant=given.batch_invariant,
            max_num_seqs=max(given.streams),
            **{"draft_forced_tokens": False, **self.config(name, given), **options},
        )
        if name == "wrong":
            draft(self.llm, Oracle({}, 0.0, self.llm.program.vocab_size), None)
        self.seconds: list[float] = []
        self.before: dict[str, float] = {}
        self.predicted = Predicted(self.drafting)
        self.mark()

    @staticmethod
    def config(name: str, given: argparse.Namespace) -> dict[str, Any]:
        """The options of a method."""
        if name not in ("mtp", "draft_model"):
            return METHODS.get(name, {})
        model = given.head if name == "mtp" else given.draft_model
        return {"speculative_config": {"method": name} | ({} if model is None else {"model": model})}

    def run(self, prompts: Sequence[Any], params: pagoda.SamplingParams) -> list[RequestOutput]:
        """Generate, and note the seconds."""
        started = self.clock()
        outputs = self.llm.generate(prompts, params)
        self.seconds.append(self.clock() - started)
        return outputs

    def serve(self, prompts: Sequence[Any], lengths: Sequence[int], clients: int) -> tuple[list[list[int]], float]:
        """Answer the requests of clients, each of which sends the next one when its last is answered.

        Returns:
            The tokens of each request, and tokens per second up to when none is left to be sent: behind that, fewer
            and fewer run.
        """
        left = list(range(len(prompts)))[::-1]
        found: dict[str, list[int]] = {}

        def send(count: int) -> None:
            for number in [left.pop() for _ in range(min(count, len(left)))]:
                params = pagoda.SamplingParams(temperature=0, max_tokens=lengths[number], ignore_eos=True)
                self.llm.submit_many([prompts[number]], params, [str(number)], final_only=True)

        before, started, speed = self.llm.stats()["generated_tokens"], self.clock(), 0.0
        send(clients)
        while self.llm.has_unfinished():
            ended = self.llm.step()
            found |= {output.request_id: list(output.outputs[0].token_ids) for output in ended}
            if ended and left:
                send(len(ended))
                if not left:
                    taken = self.clock() - started
                    speed = (self.llm.stats()["generated_tokens"] - before) / taken
        return [found[str(number)] for number in range(len(prompts))], speed

    @contextmanager
    def without_drafts(self) -> Iterator[None]:
        """The engine as it is without drafts; figures of its steps are not counted."""
        state, before = self.llm._core.state, self.llm.stats()
        drafting = state.drafting
        state.drafting = state.batcher.planner.drafting = None
        try:
            yield
        finally:
            state.drafting = state.batcher.planner.drafting = drafting
            for name in ("steps", "total_seconds"):
                self.before[name] += self.llm.stats()[name] - before[name]

    def mark(self) -> None:
        """Begin to count."""
        self.seconds = []
        self.predicted.forget()
        self.before = self.llm.stats()

    def since(self, name: str) -> float:
        """Growth of a figure since the mark."""
        return self.llm.stats().get(name, 0) - self.before.get(name, 0)

    @property
    def drafting(self) -> Any:
        """What plans its drafts."""
        return self.llm._core.state.drafting

    def accepted(self) -> str:
        """The share of drafts that were accepted, by position."""
        drafts = max(self.since("spec_decode_num_drafts"), 1)
        shares = [self.since(name) / drafts for name in ACCEPTED_BY_PLACE]
        return " ".join(f"{share:.2f}" for share in shares if share) or "none"


class Predicted:
    """What accepted drafts and the measured costs of steps predict.

    Attributes:
        steps: (rows, requests, tokens given, seconds) of each, and whether it could have had drafts.
        drafts: (drafter, requests, most drafts) of each time that drafts were computed.
        seconds: that drafting took.
    """

    def __init__(self, drafting: Any) -> None:
        self.drafting, self.seconds = drafting, 0.0
        self.steps: list[tuple[int, int, int, float, bool]] = []
        self.drafts: list[tuple[Any, int, int]] = []
        if drafting is None:
            return
        learn, extend, compute = drafting.learn, drafting.extend, drafting.drafters.propose_all

        def learning(scheduled: Sequence[Any], given: Sequence[int], seconds: float) -> None:
            rows = sum([item.num_tokens for item in scheduled])
            is_decode = all(item.is_last_chunk and item.num_tokens <= 1 + LENGTHS[-1] for item in scheduled)
            self.steps.append((rows, len(scheduled), sum(given), seconds, is_decode))
            learn(scheduled, given, seconds)

        def computing(drafter: Any, requests: Sequence[Any], most: int) -> bool:
            self.drafts.append((drafter, len(requests), most))
            return bool(compute(drafter, requests, most))

        def extending(plan: Any) -> None:
            started = time.perf_counter()
            extend(plan)
            self.seconds += time.perf_counter() - started

        drafting.learn, drafting.extend, drafting.drafters.propose_all = learning, extending, computing

    def forget(self) -> None:
        """Begin anew."""
        self.steps, self.drafts, self.seconds = [], [], 0.0

    def ratio(self, batch: int = 0) -> float:
        """Speed relative to that of the same tokens one by one.

        Args:
            batch: requests of a batch of one length, which ends when all of them do; 0: others follow them.
        """
        if self.drafting is None:
            return 1.0
        of = self.drafting.lengths.seconds.of
        decodes = [step for step in self.steps if step[-1]]
        prompts = sum([took for *_, took, decode in self.steps if not decode])
        if batch:
            plain = sum([given for _, _, given, _, _ in decodes]) / batch * of(batch)
        else:
            plain = sum([of(count) * given / count for _, count, given, _, _ in decodes])
        own = sum([of(rows) for rows, *_ in decodes])
        slowness = self.drafting.lengths.slowness
        own += sum([slowness(d.name) * d.seconds_of(count, most) for d, count, most in self.drafts])
        return (prompts + plain) / (prompts + own)


def replays() -> tuple[int, int]:
    """Steps of this process that were replayed from records, and all that could be."""
    steps = recorded_steps()
    return steps.replayed, steps.asked


def recorded_steps() -> Any:
    """The counter around the program's records, put there on first use."""
    from torch_pagoda.compiler.targets.cpu import recorded_step

    if not hasattr(recorded_step, "counted"):
        recorded_step.counted = Counted()  # type: ignore[attr-defined]
        run, replay = recorded_step.RecordedSteps.__call__, recorded_step._Step.replay
        counted = recorded_step.counted  # type: ignore[attr-defined]

        def counting_run(self: Any, args: Any) -> Any:
            counted.asked += 1
            return run(self, args)

        def counting_replay(self: Any, args: Any) -> Any:
            counted.replayed += 1
            return replay(self, args)

        recorded_step.RecordedSteps.__call__ = counting_run  # type: ignore[method-assign]
        recorded_step._Step.replay = counting_replay  # type: ignore[method-assign]
    return recorded_step.counted  # type: ignore[attr-defined]


class Counted:
    """Calls of recorded steps in this process."""

    asked = 0
    replayed = 0


def held_out(llm: pagoda.LLM, count: int, length: int) -> list[list[int]]:
    """Prompts cut out of texts that no model of ours was trained on, as many of them as there are."""
    assert llm.tokenizer is not None
    text = "\n".join([path.read_text("utf-8") for path in TEXTS])
    ids = llm.tokenizer(text, add_special_tokens=False).input_ids
    count = max(min(count, len(ids) // length), 1)
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def measure_methods(given: argparse.Namespace) -> None:
    """Continue held-out text."""
    sides = [Side(name, given) for name in given.methods]
    runs = 2 * (given.rounds + 1) * sum(given.streams)
    texts = held_out(sides[0].llm, runs * (1 + REQUESTS_OF_A_CLIENT), given.prompt)
    for workload in given.workloads:
        for streams in given.streams:
            measure_sides(sides, workload, streams, texts, given)


def measure_sides(
    sides: Sequence[Side], workload: str, streams: int, texts: list[Any], given: argparse.Namespace
) -> None:
    """Let sides take turns, each of them as often first as any other. No prompt comes twice."""
    count = streams if workload == "batch" else streams * REQUESTS_OF_A_CLIENT
    params = pagoda.SamplingParams(temperature=0, max_tokens=given.max_tokens, ignore_eos=True)
    draws = random.Random(streams)
    tokens: dict[str, list[Any]] = {side.name: [] for side in sides}
    ratios: dict[str, list[float]] = {side.name: [] for side in sides}
    own: dict[str, list[float]] = {side.name: [] for side in sides}
    counted = {side.name: np.zeros(2) for side in sides}
    for number in range(given.rounds + 1):
        prompts, others = ([texts.pop() for _ in range(count)] for _ in range(2))
        lengths = [draws.randint(given.max_tokens // 4, given.max_tokens * 7 // 4) for _ in prompts]
        first = number % len(sides)
        speeds: dict[str, float] = {}
        for side in (*sides[first:], *sides[:first]):
            if number == 1:
                side.mark()

            def speed(prompts: list[Any], side: Side = side, lengths: list[int] = lengths) -> tuple[list[Any], float]:
                if workload == "clients":
                    return side.serve(prompts, lengths, streams)
                outputs = side.run(prompts, params)
                return [list(o.outputs[0].token_ids) for o in outputs], 1 / side.seconds[-1]

            with side.without_drafts():
                plain = speed(others)[1] if number % 2 else 0.0
            before = replays()
            answers, speeds[side.name] = speed(prompts)
            tokens[side.name].append(answers)
            if number:
                counted[side.name] += np.subtract(replays(), before)
                with side.without_drafts():
                    plain = plain or speed(others)[1]
                own[side.name].append(speeds[side.name] / plain)
        if number:
            for side in sides:
                ratios[side.name].append(speeds[side.name] / speeds[sides[0].name])
    for side in sides:
        drafts = side.since("spec_decode_num_draft_tokens")
        accepted = side.since("spec_decode_num_accepted_tokens")
        replayed, asked = counted[side.name]
        drafting = side.predicted.seconds / side.since("total_seconds")
        predicted = side.predicted.ratio(streams if workload == "batch" else 0)
        print(
            f"{workload:7} {streams:2}  {side.name:11} {statistics.median(ratios[side.name]):6.3f} x none "
            f"own {statistics.median(own[side.name]):6.3f} ({min(own[side.name]):.3f}-{max(own[side.name]):.3f})  "
            f"predicted {predicted:6.3f}  steps {side.since('steps'):5.0f}  "
            f"drafted {drafts:5.0f}  accepted {accepted:5.0f}, by position {side.accepted()}  "
            f"replayed {replayed / max(asked, 1):5.1%}  drafting {drafting:5.1%}  "
            f"tokens equal: {tokens[side.name] == tokens[sides[0].name]}",
            flush=True,
        )


def measure_recorded(given: argparse.Namespace) -> None:
    """Recorded answers as drafts of one stream."""
    plain, drafted = Side("none", given), Side("recorded", given)
    params = pagoda.SamplingParams(temperature=0, max_tokens=given.max_tokens, ignore_eos=True)
    prompts = held_out(plain.llm, 4, given.prompt)
    answers = {
        (tuple(p), None): o.outputs[0].token_ids for p, o in zip(prompts, plain.run(prompts, params), strict=True)
    }
    drafting = draft(drafted.llm, Oracle(answers, given.right, plain.llm.program.vocab_size), None)
    speeds: list[float] = []
    lengths: list[int] = []
    num_equal = 0
    choose = drafting.lengths.choose

    def choosing(*step: Any) -> Any:
        chosen = choose(*step)
        lengths.append(chosen[0])
        return chosen

    drafting.lengths.choose = choosing
    for number in range(given.rounds + 1):
        for prompt in prompts:
            sides = (plain, drafted) if number % 2 else (drafted, plain)
            for side in sides:
                (output,) = side.run([prompt], params)
                num_equal += output.outputs[0].token_ids == answers[tuple(prompt), None]
            if number:
                speeds.append(plain.seconds[-1] / drafted.seconds[-1])
        if not number:
            lengths.clear()
    seconds = drafting.lengths.seconds
    cost = {rows: seconds.of(rows) / seconds.of(1) for rows in (1, 2, 4, 8)}
    kept = given.right
    predicted = statistics.mean(
        [sum(kept**place for place in range(length + 1)) / cost[1 + length] for length in lengths] or [1.0]
    )
    print(
        f"recorded answers, {given.right:.0%} right: {statistics.median(speeds):.3f} x none, "
        f"predicted {predicted:.3f}; "
        f"rows cost {', '.join(f'{rows}: {share:.2f}' for rows, share in cost.items())}; lengths "
        f"{ {length: lengths.count(length) for length in sorted(set(lengths))} }; "
        f"{num_equal} of {2 * len(prompts) * (given.rounds + 1)} answers equal"
    )


def measure_repeated(given: argparse.Namespace) -> None:
    """Requests that come again."""
    side = Side("suffix", given)
    params = pagoda.SamplingParams(temperature=0, max_tokens=given.max_tokens, ignore_eos=True)
    prompts, steps = held_out(side.llm, 4, given.prompt), []
    for _ in range(2):
        side.mark()
        for prompt in prompts:
            side.run([prompt], params)
        steps.append(side.since("steps"))
    print(f"requests that come again: {steps[0]:.0f} steps, then {steps[1]:.0f}: {steps[0] / steps[1]:.2f} x fewer")


def measure_forced(given: argparse.Namespace) -> None:
    """A schema of ten fields."""
    sides = [Side("none", given), Side("forced", given, draft_forced_tokens=True)]
    params = pagoda.SamplingParams(temperature=0, max_tokens=512, structured_outputs={"json": SCHEMA})
    speeds = []
    texts: dict[str, Any] = {}
    for number in range(given.rounds + 1):
        for side in sides if number % 2 else sides[::-1]:
            if number == 1:
                side.mark()
            texts[side.name] = side.run(["Describe a person:"], params)[0].outputs[0]
        if number:
            speeds.append(sides[0].seconds[-1] / sides[1].seconds[-1])
    assert texts["none"].token_ids == texts["forced"].token_ids, "another token"
    steps = [side.since("steps") / given.rounds for side in sides]
    print(
        f"a schema of ten fields, {len(texts['none'].token_ids)} tokens: {steps[0]:.0f} steps, with drafts "
        f"{steps[1]:.0f}: {steps[0] / steps[1]:.2f} x fewer, {statistics.median(speeds):.2f} x as fast"
    )


def beside(model: str, kind: str) -> str | None:
    """The folder that ``train_tiny.py --draft`` writes for a model, if it is there."""
    folder = Path(f"{model.rstrip('/')}-{kind}")
    return str(folder) if folder.is_dir() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="examples/tiny-pydoc")
    parser.add_argument("--parts", default="methods,recorded,repeated,forced")
    parser.add_argument("--methods", default="none,wrong,ngram,suffix", type=lambda text: text.split(","))
    parser.add_argument("--draft-model", help="checkpoint of the method draft_model (default: MODEL-draft)")
    parser.add_argument("--head", help="checkpoint of mtp (default: MODEL-mtp, or the model's own)")
    parser.add_argument("--workloads", default="batch,clients", type=lambda text: text.split(","))
    parser.add_argument("--streams", default="1,8,32", type=lambda text: list(map(int, text.split(","))))
    parser.add_argument("--dtype", default="float32", help="in bfloat16, give --batch-invariant for equal tokens")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: where others use the machine")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--right", type=float, default=0.7)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.methods[0] != "none":
        parser.error("--methods begins with none, which the others are compared with")
    given.draft_model = given.draft_model or beside(given.model, "draft")
    given.head = given.head or beside(given.model, "mtp")
    if "draft_model" in given.methods and given.draft_model is None:
        parser.error("--methods draft_model needs --draft-model")
    parts = {
        "methods": measure_methods,
        "recorded": measure_recorded,
        "repeated": measure_repeated,
        "forced": measure_forced,
    }
    for part in given.parts.split(","):
        parts[part](given)


if __name__ == "__main__":
    main()
