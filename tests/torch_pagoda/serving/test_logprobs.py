"""Log-probabilities that JSON has no word for."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from torch_pagoda.serving.engine_process.wire import TokenLogprob
from torch_pagoda.serving.generation.logprobs import (
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)


@pytest.mark.parametrize(
    ("logprob", "expected"),
    [
        (math.nan, -9999.0),
        (-math.inf, -9999.0),
        (-3e38, -9999.0),
        (math.inf, -9999.0),
        (-9998.5, -9998.5),
        (0.0, 0.0),
    ],
)
def test_all_forms_are_json_and_end_where_those_of_vllm_do(logprob: float, expected: float) -> None:
    entry = [TokenLogprob(7, logprob, 2, "a"), TokenLogprob(8, logprob, 1, "b")]
    texts = TokenTexts(None)
    chat = chat_logprobs([entry], 2, texts)
    completion = completion_logprobs([None, entry], 2, texts, 0)
    prompt = prompt_logprobs([None, entry])
    json.dumps(msgspec.to_builtins([chat, completion, prompt]), allow_nan=False)
    assert chat[0].logprob == chat[0].top_logprobs[1].logprob == expected
    assert completion.token_logprobs == [None, expected]
    assert completion.top_logprobs == [None, {"a": expected, "b": expected}]
    assert prompt[1] is not None and prompt[1]["8"].logprob == expected
