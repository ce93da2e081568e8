from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.serving.engine_process.client import EngineDied, EngineUnavailable, RequestRefused
from torch_pagoda.serving.engine_process.wire import Submit

from toy_client import BYTES, merged, read_all, toy_client, toy_engine
from toy_program import ToyProgram

PROMPTS = ["Hello", "a", "Some longer prompt", "naïve 🙂"]
IDS: list[list[int]] = [BYTES(prompt).input_ids for prompt in PROMPTS]


def run(coroutine: Any) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(bounded())


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3, "n": 3},
        {"temperature": 1.5, "seed": 2, "stop": ["l", "\x19"], "include_stop_str_in_output": True},
        {"temperature": 1.0, "seed": 3, "n": 2, "best_of": 4},
        {"temperature": 0, "logit_bias": {66: 9.0, 240: 9.0, 159: 9.0}},
    ],
)
def test_deltas_make_up_what_generate_returns(params: dict[str, Any], streams: bool) -> None:
    want = toy_engine().generate(PROMPTS, SamplingParams(**params, max_tokens=12))

    async def use() -> None:
        async with toy_client(toy_engine(num_blocks=32)) as client:
            deltas = await read_all(client.submit(Submit("r", IDS, {**params, "max_tokens": 12}, {}, streams)))
        found = merged(deltas)
        assert found == {
            (i, completion.index): (completion.text, completion.token_ids, completion.finish_reason)
            for i, output in enumerate(want)
            for completion in output.outputs
        }
        if not streams:
            assert len(deltas) == len(found)
        assert [delta.times is not None for delta in deltas].count(True) == len(IDS)
        for delta in deltas:
            if delta.times is not None:
                assert delta.times.num_generated_tokens == want[delta.prompt_index].metrics.num_generated_tokens

    run(use())


def test_log_probabilities() -> None:
    params = {"max_tokens": 4, "temperature": 0, "logprobs": 2, "prompt_logprobs": 1}
    (want,) = toy_engine().generate("Hello", SamplingParams(**params))

    async def use() -> None:
        async with toy_client(toy_engine()) as client:
            deltas = await read_all(client.submit(Submit("r", IDS[:1], params)))
        (scores,) = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
        entries = [entry for delta in deltas for entry in delta.logprobs or ()]
        known = [*(want.prompt_logprobs or ()), *(want.outputs[0].logprobs or ())]
        for found, expected in zip([*scores, *entries], known, strict=True):
            assert (found is None) == (expected is None)
            triples = [(entry.token_id, entry.rank, entry.text) for entry in found or ()]
            assert triples == [(token, e.rank, e.decoded_token) for token, e in (expected or {}).items()]

    run(use())


def test_prompts_that_are_only_scored() -> None:
    async def use() -> None:
        async with toy_client(toy_engine()) as client:
            (delta,) = await read_all(client.submit(Submit("r", IDS[:1], {"max_tokens": 0, "prompt_logprobs": 0})))
            assert delta.finish_reason == "length" and delta.token_ids == [] and delta.times is not None
            assert delta.times.decode is None and (delta.times.prefill or 0) > 0
            assert delta.prompt_logprobs is not None and len(delta.prompt_logprobs) == 5

    run(use())


def test_a_slow_reader_finds_everything_merged() -> None:
    async def use() -> None:
        engine = toy_engine()
        async with toy_client(engine) as client:
            stream = client.submit(Submit("r", IDS[:2], {"max_tokens": 40, "temperature": 0}))
            quick = client.submit(Submit("q", IDS[:1], {"max_tokens": 40, "temperature": 0}))
            reads = 0
            while await quick.next():
                reads += 1
            while not stream.is_complete:
                await asyncio.sleep(0.01)
            deltas = await stream.next()
            assert [(d.prompt_index, len(d.token_ids), d.finish_reason) for d in deltas] == [
                (0, 40, "length"),
                (1, 40, "length"),
            ]
            assert await stream.next() == [] and reads > 2

    run(use())


def test_cancel_frees_all_blocks() -> None:
    async def use() -> None:
        engine = toy_engine()
        async with toy_client(engine) as client:
            streams = [client.submit(Submit(str(i), IDS, {"max_tokens": 100, "n": 2})) for i in range(3)]
            await streams[0].next()
            steps = (await client.ask("stats"))["steps"]
            for stream in streams:
                stream.cancel()
            stats = await client.ask("stats")
            assert stats["running"] == stats["queue_length"] == stats["blocks_used"] == 0
            assert stats["steps"] < steps + 40
            for stream in streams:
                found = merged(await read_all(stream))
                assert found and {reason for _, _, reason in found.values()} == {"cancelled"}
                stream.cancel()
            assert client.seconds_since_heard == 0
            assert not client._streams

    run(use())


def test_refusals() -> None:
    async def use() -> None:
        async with toy_client(toy_engine(max_num_seqs=1, max_queue=3)) as client:

            async def refusal(prompts: list[list[int]], params: dict[str, Any], **options: Any) -> tuple[str, str]:
                with pytest.raises(RequestRefused) as caught:
                    await client.submit(Submit("r", prompts, params, options)).next()
                return caught.value.code, str(caught.value)

            assert await refusal([[1], []], {}) == ("invalid", "prompts[1]=[] is empty; give at least one token id")
            assert (await refusal([], {}))[0] == "invalid"
            assert await refusal([[1], [300]], {}) == (
                "invalid",
                "prompts[1][0]=300 is outside the vocabulary [0, 258); use ids of the model's tokenizer",
            )
            assert "temperature=-1" in (await refusal([[1]], {"temperature": -1}))[1]
            assert "nonsense" in (await refusal([[1]], {"nonsense": 1}))[1]
            assert "deadline" in (await refusal([[1]], {}, deadline=-1))[1]
            assert (await refusal([[1]], {"logit_bias": {"a": 1}}))[0] == "invalid"
            assert (await refusal([[1]], {}, client="\0" * 4, cache_salt=3))[0] == "invalid"
            assert await refusal([[1]] * 2, {"n": 2}) == (
                "queue_full",
                "the queue is full: 4 new requests, 0 waiting, max_queue=3; retry later, or raise max_queue",
            )
            running = client.submit(Submit("a", [[1]] * 3, {"max_tokens": 100}))
            await running.next()
            running2 = client.submit(Submit("b", [[1]], {"max_tokens": 1}))
            assert (await refusal([[1]], {}))[0] == "queue_full"
            assert client.stats["restarts"] == 0
            with pytest.raises(ValueError, match="'a' is in use"):
                client.submit(Submit("a", [[1]], {}))
            running.cancel()
            assert merged(await read_all(running2))[0, 0][2] == "length"

    run(use())


def test_questions() -> None:
    async def use() -> None:
        async with toy_client(toy_engine()) as client:
            assert (
                client.hello.model == "toy" and client.hello.vocab_size == 258 and client.hello.max_model_len == 128
            )
            assert await client.ask("ping") is None
            await read_all(client.submit(Submit("r", IDS[:1], {"max_tokens": 3})))
            assert (await client.ask("stats"))["generated_tokens"] == 3
            assert (await client.ask("profile"))["num_generated_tokens"] == 3
            assert (await client.ask("stats"))["blocks_cached"] > 0
            await client.ask("reset_prefix_cache")
            assert (await client.ask("stats"))["blocks_cached"] == 0
            with pytest.raises(ValueError, match="'nonsense' is unknown"):
                await client.ask("nonsense")
            assert client.seconds_since_heard == 0

    run(use())


def test_figures_come_by_themselves() -> None:
    async def use() -> None:
        async with toy_client(toy_engine(), stats_interval=0.0) as client:
            stream = client.submit(Submit("r", IDS[:1], {"max_tokens": 20}))
            await stream.next()
            assert client.stats["running"] == 1
            await read_all(stream)
            while client.stats["running"]:
                await asyncio.sleep(0.01)
            assert client.stats["generated_tokens"] == 20 and client.stats["finished_length"] == 1

    run(use())


def test_an_engine_that_does_not_answer() -> None:
    program = ToyProgram(vocab_size=258)
    go_on = threading.Event()
    program.before_call = lambda tokens: go_on.wait(30) and None

    async def use() -> None:
        async with toy_client(toy_engine(program)) as client:
            stream = client.submit(Submit("r", IDS[:1], {"max_tokens": 2}))
            with pytest.raises(TimeoutError):
                await client.ask("ping", timeout=0.1)
            assert client.seconds_since_heard > 0.05
            go_on.set()
            await read_all(stream)
            assert client.seconds_since_heard == 0

    run(use())


def test_closing_ends_what_is_under_way() -> None:
    async def use() -> None:
        engine = toy_engine()
        async with toy_client(engine) as client:
            stream = client.submit(Submit("r", IDS, {"max_tokens": 100}))
            await stream.next()
        with pytest.raises(EngineDied):
            await read_all(stream)
        assert client.state == "dead" and engine.block_manager.num_used_blocks == 0
        assert not engine.has_unfinished() and not engine._core.state.submissions
        with pytest.raises(EngineUnavailable):
            client.submit(Submit("x", IDS, {}))
        with pytest.raises(EngineUnavailable):
            await client.ask("ping")
        async with toy_client(engine) as client:  # the engine can be used again
            assert len(await read_all(client.submit(Submit("r", IDS[:1], {"max_tokens": 1})))) == 1

    run(use())


def test_an_engine_that_fails_three_times_in_a_row_ends() -> None:
    engine = toy_engine()
    failures = 0

    def fail() -> None:
        nonlocal failures
        failures += 1
        raise LookupError("a weight is gone")

    async def use() -> None:
        async with toy_client(engine) as client:
            engine._core.before_step = fail
            stream = client.submit(Submit("r", IDS[:1], {}))
            began = time.monotonic()
            with pytest.raises(EngineDied):
                await read_all(stream)
            await client.wait_dead()
            assert time.monotonic() - began < 30
            assert client.state == "dead"

    run(use())
    assert failures == 3


def test_a_step_that_fails_for_once_costs_nothing() -> None:
    engine = toy_engine()
    want = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=20, temperature=0))[0].outputs[0]
    calls = 0

    def fail_sometimes() -> None:
        nonlocal calls
        calls += 1
        if calls % 3:
            raise LookupError("now and then")

    async def use() -> None:
        async with toy_client(engine) as client:
            engine._core.before_step = fail_sometimes
            found = merged(await read_all(client.submit(Submit("r", IDS[:1], {"max_tokens": 20, "temperature": 0}))))
            assert found[0, 0] == (want.text, want.token_ids, "length")

    run(use())


def test_a_request_that_fails_harms_nobody() -> None:
    program = ToyProgram(vocab_size=258)

    def fail(tokens: torch.Tensor) -> None:
        if 7 in tokens:
            raise ArithmeticError("seven")

    program.before_call = fail

    async def use() -> None:
        async with toy_client(toy_engine(program)) as client:
            good = client.submit(Submit("g", [[66]], {"max_tokens": 5, "logit_bias": {7: -100}}))
            bad = client.submit(Submit("b", [[7]], {"max_tokens": 5}))
            (delta,) = await read_all(bad)
            assert delta.finish_reason == "error" and "seven" in (delta.error or "")
            assert merged(await read_all(good))[0, 0][2] == "length"

    run(use())
