from __future__ import annotations

from typing import Any

import pytest

from torch_pagoda.runtime.engine.submission import Submission
from torch_pagoda.runtime.requests.request_options import RequestOptions
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import character_tokenizer

BYTES: Any = character_tokenizer()


@pytest.mark.parametrize(("min_tokens", "reasons"), [(3, [None, None, None, "stop"]), (4, [None] * 4)])
def test_a_stop_string_that_is_complete_with_the_last_of_min_tokens_does_not_stop(
    min_tokens: int, reasons: list[str | None]
) -> None:
    submission = Submission("name", None, [1], 0.0, is_private=False)
    params = SamplingParams(max_tokens=9, min_tokens=min_tokens, stop="cd")
    submission.begin_completions(params, RequestOptions(), 100, BYTES, ())
    completion = submission.completions[0]
    assert [completion.append(token, None) for token in BYTES("abcd").input_ids] == reasons
