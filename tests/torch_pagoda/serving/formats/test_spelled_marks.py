"""Values of calls that spell added tokens: ordinary text, while the marks of the format are the tokens."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from torch_pagoda.runtime.structured.asked import read_structured_outputs
from torch_pagoda.runtime.structured.grammar import compile_grammar
from torch_pagoda.runtime.structured.vocabulary import vocabulary_of
from torch_pagoda.serving.formats import resolve
from torch_pagoda.serving.formats.events import ToolCall
from torch_pagoda.serving.formats.tools import ToolChoice, check_tools

from chat_families import EOS, FAMILIES, chat_tokenizer

FAMILIES_WITH_GRAMMARS = [family for family in FAMILIES if family not in ("minimax_m3", "lfm2", "gemma4")]
SPELLED = ["see <tool_call>", "[TOOL_CALLS]", "<|im_start|>", EOS, "<b>", "<|tool_call_end|>", "]<]minimax[>["]


def draw(lark: str, tokenizer: Any, seed: int) -> list[int]:
    """Random tokens that the grammar takes, with its end."""
    state = compile_grammar(read_structured_outputs({"grammar": lark}), vocabulary_of(tokenizer)).start()
    rng, tokens = random.Random(seed), list[int]()
    while not state.is_finished and len(tokens) < 500:
        mask = int.from_bytes(state.matcher.compute_bitmask(), "little")
        allowed = [token for token in range(mask.bit_length()) if mask >> token & 1]
        token = tokenizer.eos_token_id if tokenizer.eos_token_id in allowed else rng.choice(allowed)
        state.consume(token)
        tokens.append(token)
    assert state.is_finished
    return tokens


@pytest.mark.parametrize("family", FAMILIES_WITH_GRAMMARS)
def test_values_are_text_and_marks_are_tokens(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    found = resolve(None, tokenizer)
    assert found is not None
    schema = {"type": "object", "properties": {"a": {"enum": SPELLED}}, "required": ["a"]}
    function = {"name": "f", "strict": True, "parameters": {**schema, "additionalProperties": False}}
    tools = check_tools([{"type": "function", "function": function}])
    lark = found.grammar(tools, ToolChoice("required"), parallel=False)
    assert lark is not None
    marks = {i for i, token in tokenizer.added_tokens_decoder.items()}
    for seed in range(len(SPELLED)):
        tokens = draw(lark, tokenizer, seed)
        parser = found.parser("", tools)
        written = tokenizer.decode([token for token in tokens if token != tokenizer.eos_token_id])
        (call,) = [*parser.feed(written), *parser.finish()]
        assert isinstance(call, ToolCall), written
        value = json.loads(call.arguments)["a"]
        assert value in SPELLED
        head, _, tail = written.rpartition(value)
        meant = {token for part in (head, tail) for token in tokenizer.encode(part)}
        assert marks & set(tokens) - {tokenizer.eos_token_id} == marks & meant, written
