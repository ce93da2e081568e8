"""What benchmarks/serving_soak.py would notice."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from serving_soak import Sample, Soak
from serving_soak_requests import BAD, KNOWN, Answer, Traffic, Wrong


class Told(Traffic):
    """Traffic whose answers are given, not asked for."""

    def __init__(self, *answers: Answer) -> None:
        super().__init__("http://127.0.0.1:1", random.Random(0))
        self.answers = list(answers)

    async def ask(self, *_: Any, **__: Any) -> Answer:
        return self.answers.pop(0)


def soak() -> Soak:
    draw = random.Random(0)
    return Soak(cast("subprocess.Popen[str]", None), "", Traffic("http://127.0.0.1:1", draw), draw)


def completion(text: str = "a", reason: str = "length", **choice: Any) -> Answer:
    choices = [{"index": 0, "text": text, "finish_reason": reason, "stop_reason": None, **choice}]
    return Answer(200, body={"choices": choices})


def stream(*texts: str, reason: str = "length", is_done: bool = True) -> Answer:
    last = {"index": 0, "text": "", "finish_reason": reason, "stop_reason": None}
    choices = [{"index": 0, "text": text, "finish_reason": None, "stop_reason": None} for text in texts]
    return Answer(200, events=[{"choices": [choice]} for choice in (*choices, last)], is_done=is_done)


def chat(content: str, reason: str = "stop", **message: Any) -> Answer:
    found = {"index": 0, "message": {"content": content, **message}, "finish_reason": reason, "stop_reason": None}
    return Answer(200, body={"choices": [found]})


def calls(arguments: str) -> Answer:
    return chat("", "tool_calls", tool_calls=[{"function": {"name": "get_weather", "arguments": arguments}}])


KINDS: list[tuple[Callable[[Told], Awaitable[str]], Answer, Answer]] = [
    (Told.schema, completion('{"name1": "a", ', "length"), completion('{"name1": 3}', "stop")),
    (Told.constrained, chat("abcd", "length"), chat("an answer that nothing allows")),
    (Told.tool, calls('{"city": "x", "unit": "celsius"}'), calls('{"city": "x", "unit": "kelvin"}')),
    (Told.tool, chat("…", "length"), chat("I would rather not.")),
    (Told.late, Answer(504), completion("a", "stop")),
    (Told.responses, Answer(200, is_done=True), Answer(200, events=[{"type": "response.created"}])),
    (Told.messages, Answer(429, {"retry-after": "3"}), Answer(429)),
    (Told.tokens, Answer(503), Answer(500, body={"error": {}})),
    (Told.bad, Answer(429), Answer(200)),
    (lambda told: told.burst(1), Answer(200, is_done=True), Answer(503)),
]


@pytest.mark.parametrize(("kind", "right", "wrong"), KINDS)
def test_an_answer_that_is_wrong_is_seen(
    kind: Callable[[Told], Awaitable[str]], right: Answer, wrong: Answer
) -> None:
    assert asyncio.run(kind(Told(right)))
    with pytest.raises(Wrong):
        asyncio.run(kind(Told(wrong)))


def test_texts_that_are_not_those_of_the_beginning_are_seen() -> None:
    async def run(answer: Answer) -> str:
        traffic = Told(answer)
        traffic._expected = {i: [("ab", "length", None)] for i in range(len(KNOWN))}
        return await traffic.known()

    for right in (completion("ab"), stream("a", "b"), stream("ab")):
        assert asyncio.run(run(right)) == "the same text"
    for wrong in (completion("ac"), completion("ab", "stop"), stream("a"), stream("a", "b", is_done=False)):
        with pytest.raises(Wrong):
            asyncio.run(run(wrong))
    assert {status for _, _, status in BAD} == {400, 404, 413}


def test_failures_are_violations_unless_the_engine_was_killed() -> None:
    async def ends(how: str) -> str:
        if how.startswith("wrong"):
            raise Wrong(how)
        return how

    async def run() -> Soak:
        found = soak()
        for how in ("known: 503", "known: 0", "tool: error event", "wrong", "known: 408"):
            await found._follow(ends(how))
        assert len(found.violations) == 5
        for how in ("slow_body: 408", "known: 429", "known: the same text"):
            await found._follow(ends(how))
        assert len(found.violations) == 5
        found._excused.append((found._begin, found._begin + 60))
        await found._follow(ends("known: 503"))
        assert len(found.violations) == 5 and found.num_ended == 9
        return found

    assert asyncio.run(run()).traffic.counts["known: 503 (excused)"] == 1


def sample(requests: int, rss: float, pid: int = 1, **changes: Any) -> Sample:
    fields: dict[str, Any] = {"fds": (20, 8), "threads": (8, 3), "tasks": 9, **changes}
    return Sample(requests, requests / 500, pid, (rss, rss, 0.0), **fields)


def test_growth_and_counters_that_fall_are_seen() -> None:
    found = soak()
    found.samples = [sample(500 * i, min(300 + 10 * i, 350)) for i in range(20)]
    assert found.growth(0) == pytest.approx(0)
    found.samples = [sample(500 * i, 300 + i) for i in range(20)]
    assert found.growth(0) == found.growth(1) == pytest.approx(2)
    # Another engine begins with less.
    found.samples += [sample(500 * i, 200, pid=2) for i in range(20, 25)]
    assert found.growth(1) == pytest.approx(2)

    found._look_at_counters('a_total{x="1"} 5.0\nb 3.0\n')
    found._look_at_counters('a_total{x="1"} 6.0\nb 1.0\n')
    assert found.violations == [] and found.counter("a_total") == 6
    found._look_at_counters('a_total{x="1"} 0.0\n')
    assert len(found.violations) == 1
