"""``step_pieces``, ``submit_many``, ``cancel_many`` and ``final_only``."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from torch_pagoda.runtime.batching import QueueFull
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.detokenizer import Detokenizer
from torch_pagoda.runtime.requests.outputs import CompletionOutput, StreamPiece
from torch_pagoda.runtime.requests.request_options import RequestOptions
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram, character_tokenizer

BYTES: Any = character_tokenizer()
PROMPTS = ["Hello", "a", "Some longer prompt", "naïve 🙂"]


def make_engine(program: ToyProgram | None = None, **options: Any) -> Engine:
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, **options}
    return Engine(program or ToyProgram(vocab_size=258), BYTES, **settings)


def run_all(engine: Engine) -> dict[str, list[StreamPiece]]:
    found: dict[str, list[StreamPiece]] = defaultdict(list)
    while engine.has_unfinished():
        for piece in engine.step_pieces():
            found[piece.request_id].append(piece)
    return found


def joined(pieces: list[StreamPiece]) -> list[CompletionOutput]:
    """The completions that the pieces of a request make up; each ends once, and nothing follows."""
    outputs: dict[int, CompletionOutput] = {}
    for piece in pieces:
        known = outputs.setdefault(piece.index, CompletionOutput(piece.index, "", [], None))
        assert not known.finished
        logprobs = known.logprobs
        if piece.logprobs is not None:
            logprobs = [*(known.logprobs or []), *piece.logprobs]
        assert (piece.finish_reason is not None) == piece.finished
        outputs[piece.index] = CompletionOutput(
            piece.index,
            known.text + piece.text,
            known.token_ids + piece.token_ids,
            logprobs,
            piece.finish_reason,
            piece.stop_reason,
            piece.error,
        )
    assert all(output.finished for output in outputs.values())
    assert [piece.metrics is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return [outputs[index] for index in sorted(outputs)]


def plain(outputs: list[CompletionOutput]) -> list[Any]:
    """Of the log-probabilities only the tokens: their last digits depend on what ran beside them."""
    return [replace(output, logprobs=output.logprobs and list(map(list, output.logprobs))) for output in outputs]


def says_emoji(program: ToyProgram, text: str) -> ToyProgram:
    """Let the model say the text's bytes over and over, whatever the prompt."""
    script = [int(token) for token in BYTES(text).input_ids]
    following = {token: script[(i + 1) % len(script)] for i, token in enumerate(script)}
    assert len(following) == len(script), "a byte has two followers"

    def change(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        changed = torch.full_like(logits, -10.0)
        for row, token in enumerate(tokens.tolist()):
            changed[row, following.get(token, script[0])] = 10.0
        return changed

    program.change_logits = change
    return program


@pytest.mark.parametrize("final_only", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": 2},
        {"n": 3, "temperature": 1.0, "seed": 4},
        {"stop": ["b", "\x19\x19", "zz"], "temperature": 1.0, "seed": 1},
        {"stop": ["l"], "include_stop_str_in_output": True, "temperature": 1.5, "seed": 2},
        {"temperature": 1.0, "seed": 3, "n": 2, "best_of": 4},
        {"temperature": 1.0, "seed": 3, "n": 2, "best_of": 4, "logprobs": 1},
        {"prompt_logprobs": 1, "n": 2},
    ],
)
def test_pieces_make_up_what_generate_returns(options: dict[str, Any], final_only: bool) -> None:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 14, **options})
    want = make_engine().generate(PROMPTS, params)
    tight = make_engine(num_blocks=12, max_num_batched_tokens=5)
    names = tight.submit_many(PROMPTS, params, final_only=final_only)
    found = run_all(tight)
    assert tight.stats()["preemptions"] > 0 or "stop" in options
    for name, output in zip(names, want, strict=True):
        pieces = found.pop(name)
        assert plain(joined(pieces)) == plain(output.outputs)
        scores = [piece for piece in pieces if piece.prompt_logprobs is not None]
        assert len(scores) == (params.prompt_logprobs == 1)
        for piece in scores:
            pairs = zip(piece.prompt_logprobs or (), output.prompt_logprobs or (), strict=True)
            assert all(list(found or ()) == list(entry or ()) for found, entry in pairs)
        assert all(piece.index == 0 for piece in scores)
        if final_only or params.best_of:
            assert len(pieces) == params.n
        metrics = pieces[-1].metrics
        assert metrics is not None and metrics.num_generated_tokens == output.metrics.num_generated_tokens
        assert metrics.finished_time is not None
    assert not found and not tight._core.state.submissions and tight.block_manager.num_used_blocks == 0


def test_characters_of_several_tokens_and_stop_strings_across_pieces() -> None:
    program = says_emoji(ToyProgram(vocab_size=258), "🙂aé")
    params = SamplingParams(temperature=0, max_tokens=30, stop=["é🙂aé🙂"])
    want = make_engine(program).generate("x", params).pop().outputs
    engine = make_engine(program)
    engine.submit("x", params)
    pieces = run_all(engine).popitem()[1]
    assert joined(pieces) == want and want[0].text == "🙂a" and want[0].stop_reason == "é🙂aé🙂"
    assert "\ufffd" not in "".join(piece.text for piece in pieces)
    assert len(pieces) == len(want[0].token_ids)  # a piece for each step, most of them without text


def test_a_piece_has_one_steps_tokens() -> None:
    engine = make_engine()
    names = engine.submit_many(PROMPTS, SamplingParams(temperature=0, max_tokens=6))
    engine.step_pieces()
    for _ in range(5):
        pieces = engine.step_pieces()
        assert [piece.request_id for piece in pieces] == names
        assert all(len(piece.token_ids) == 1 for piece in pieces)


def test_cached_tokens_come_with_the_pieces() -> None:
    engine = make_engine(enable_prefix_caching=True)
    for cached in (0, 16):
        engine.submit("Some longer prompt", SamplingParams(temperature=0, max_tokens=2))
        assert [piece.num_cached_tokens for piece in run_all(engine).popitem()[1]] == [cached] * 2


def test_steps_and_final_only() -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=5)
    quiet = engine.submit_many(["Hello"], params, final_only=True)[0]
    loud = engine.submit("Hello", params)
    seen = []
    while engine.has_unfinished():
        seen += [(output.request_id, output.finished) for output in engine.step()]
    assert [finished for name, finished in seen if name == quiet] == [True]
    assert [finished for name, finished in seen if name == loud] == [False] * 4 + [True]


def test_an_output_that_cannot_be_decoded_ends_with_one_piece() -> None:
    class Broken:
        def __call__(self, text: Any, **kwargs: Any) -> Any:
            return BYTES(text, **kwargs)

        def decode(self, token_ids: Any, **kwargs: Any) -> Any:
            if len(token_ids) > 3:
                raise LookupError("no such token")
            return BYTES.decode(token_ids, **kwargs)

    engine = Engine(ToyProgram(vocab_size=258), Broken(), block_size=4, num_blocks=64)
    engine.submit([1, 2], SamplingParams(temperature=0, max_tokens=9))
    pieces = run_all(engine).popitem()[1]
    (output,) = joined(pieces)
    assert output.finish_reason == "error" and "no such token" in (output.error or "")
    assert engine.block_manager.num_used_blocks == 0
    assert list(engine.stream([1, 2], SamplingParams(temperature=0, max_tokens=9)))[-1].metrics is not None


def test_several_prompts_are_taken_together_or_not_at_all() -> None:
    engine = make_engine(max_queue=5)
    params = SamplingParams(temperature=0, max_tokens=2)
    with pytest.raises(ValueError, match=r"prompts\[2\]=\[\] is empty"):
        engine.submit_many(["a", "b", []], params)
    with pytest.raises(ValueError, match="2 entries for 3 prompts"):
        engine.submit_many(["a", "b", "c"], params, ["x", "y"])
    with pytest.raises(ValueError, match="has duplicates"):
        engine.submit_many(["a", "b"], params, ["x", "x"])
    with pytest.raises(QueueFull):
        engine.submit_many(["a", "b", "c"], SamplingParams(n=2))
    assert not engine.has_unfinished() and not engine._core.state.submissions
    assert engine.submit_many(["a", "b"], params, ["x", "y"]) == ["x", "y"]
    with pytest.raises(ValueError, match="'y' is in use"):
        engine.submit_many(["c", "d"], params, ["z", "y"])
    assert sorted(run_all(engine)) == ["x", "y"]


def test_many_are_cancelled_in_one_turn() -> None:
    engine = make_engine()
    names = engine.submit_many(PROMPTS, SamplingParams(n=2, max_tokens=50, seed=0))
    for _ in range(3):
        engine.step_pieces()
    assert engine.cancel_many([*names[:3], "nobody", names[0]]) == 3
    pieces = [piece for piece in engine.step_pieces() if piece.request_id != names[3]]
    assert [(p.request_id, p.index, p.finish_reason) for p in pieces] == [
        (name, i, "cancelled") for name in names[:3] for i in (0, 1)
    ]
    engine.cancel(names[3])
    run_all(engine)
    assert engine.block_manager.num_used_blocks == 0
    assert engine.stats()["finished_cancelled"] == 4


def test_deadlines_and_cancelled_queues_end_with_pieces() -> None:
    engine = make_engine(max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=100)
    late = engine.submit_many(["a"], params, options=RequestOptions(deadline=0.02), final_only=True)[0]
    waiting = engine.submit_many(["b"], params, final_only=True)[0]
    time.sleep(0.03)
    found = {piece.request_id: piece for piece in engine.step_pieces()}
    assert found[late].finish_reason == "timeout"
    engine.cancel(waiting)
    found |= {piece.request_id: piece for piece in engine.step_pieces()}
    assert found[waiting].finish_reason == "cancelled" and found[waiting].metrics is not None


def test_totals() -> None:
    engine = make_engine(enable_prefix_caching=True, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=3)
    engine.submit_many(["x" * 10, "x" * 10, "yyy"], params)
    engine.submit("yyyy", SamplingParams(n=2, max_tokens=2, seed=0))
    assert engine.stats()["queue_tokens"] == 27
    engine.step_pieces()
    assert engine.stats()["queue_tokens"] == 17
    run_all(engine)
    stats = engine.stats()
    assert stats["queue_tokens"] == 0
    assert stats["prompt_tokens"] == 27 and stats["cached_tokens"] == 8
    assert stats["finished_length"] == 4 and stats["generated_tokens"] == 13
    engine.generate(["a"], params)
    assert engine.stats()["finished_length"] == 5


def test_text_is_read_from_its_end() -> None:
    random.seed(0)
    detokenizer = Detokenizer(BYTES, [65])
    for token in BYTES("Straße, naïve 🙂 and € again and again").input_ids:
        detokenizer.append([token])
        start = random.randint(0, detokenizer.length + 1)
        end = random.randint(start, detokenizer.length + 1)
        parts = list(detokenizer._text)
        found = detokenizer.text_between(start, end)
        assert detokenizer._text == parts, "reading joins nothing"
        assert found == "".join(parts)[start:end]
        if random.random() < 0.2:
            assert len(detokenizer.text) == detokenizer.length
