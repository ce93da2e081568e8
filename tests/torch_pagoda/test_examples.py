"""The example scripts as a newcomer runs them; CI runs quickstart.py by itself."""

from __future__ import annotations

import io
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_pagoda.runtime.requests.validation import CheckedPrompt, check_prompt

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a script with arguments in this process, where the shipped model is compiled once for all of them."""

    def call(script: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        status = 0
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except SystemExit as ended:
            status = int(ended.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_drop_in(main: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs run uncompiled: inductor has its tests in ``tests/compiler/test_backend.py``."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, options={"codegen": "none"}))
    torch._dynamo.reset()
    status, out, err = main("drop_in.py")
    torch._dynamo.reset()
    assert status == 0, err
    lines = out.splitlines()
    assert float(lines[0].removeprefix("forward: largest difference to eager ")) < 1e-3
    assert lines[-1] == "generate: same tokens as eager: True"
    assert "torch_pagoda" not in re.sub(r'""".*?"""', "", (EXAMPLES / "drop_in.py").read_text(), flags=re.DOTALL)


def test_generate_batch(main: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = main("generate_batch.py")
    assert status == 0, err
    texts = out.split("\n\n")
    for prompt in ("Return the", "Raise a ValueError if the given", "A context manager that"):
        assert any(text.startswith(prompt) and len(text) > len(prompt) for text in texts)


CHAT_LINE = re.compile(r"^\[(\d+) of (\d+) prompt tokens from the cache, first token after \d+ ms\]$", re.MULTILINE)


def test_chat_reuses_the_history(main: Callable[..., tuple[int, str, str]]) -> None:
    turns = ["Return a list of all the names", "Raise a ValueError if the given", "What is it?"]
    status, out, _ = main("chat.py", "--max-tokens", 8, "--turns", *turns)
    assert status == 0
    assert all(f"> {turn}\n" in out for turn in turns)
    counts = [(int(cached), int(total)) for cached, total in CHAT_LINE.findall(out)]
    assert len(counts) == 3 and counts[0][0] == 0
    for (_, before), (cached, total) in pairwise(counts):
        # All full blocks of the last turn's prompt, and less than everything: the new question is computed.
        assert before // 16 * 16 <= cached < total
    hits, asked = map(sum, zip(*counts, strict=True))
    assert f"hit rate {hits / asked:.0%}, {hits} of {asked} prompt tokens" in out


def test_chat_reads_a_pipe_and_forgets_the_oldest_turns(
    main: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "the list of names " * 60  # in a context of 1,024 tokens a few of these fit
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{long}\n\n" * 6 + f"{long * 20}\nthe end\n"))
    status, out, _ = main("chat.py", "--max-tokens", 4)
    assert status == 0
    assert len(CHAT_LINE.findall(out)) == 7
    assert "[the oldest turns are forgotten" in out
    assert max(int(total) for _, total in CHAT_LINE.findall(out)) <= 1020
    assert "[refused: prompt has " in out and "max_model_len=1024" in out


TEMPLATE = """{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}\
{% if add_generation_prompt %}<answer>{% endif %}"""


@pytest.mark.parametrize("script", ["chat.py", "summarize.py", "shared_prefix.py"])
def test_a_chat_template_is_used(
    main: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    model, text = shutil.copytree(EXAMPLES / "tiny-pydoc", tmp_path / "model"), tmp_path / "text"
    (model / "chat_template.jinja").write_text(TEMPLATE)
    text.write_text("the list of names")
    arguments = {
        "chat.py": ["--turns", "the list of names"],
        "summarize.py": [text],
        "shared_prefix.py": ["--document", text, "--questions", "Who?", "What?"],
    }[script]
    seen: list[str] = []

    def noted(prompt: Any, tokenizer: Any, *rest: Any, **named: Any) -> CheckedPrompt:
        seen.append(tokenizer.decode(prompt))
        return check_prompt(prompt, tokenizer, *rest, **named)

    monkeypatch.setattr("torch_pagoda.runtime.requests.validation.check_prompt", noted)  # for generate
    monkeypatch.setattr("torch_pagoda.runtime.engine.engine.check_prompt", noted)  # for stream
    status, _, err = main(script, "--model", model, "--max-tokens", 2, *arguments)
    assert status == 0, err
    assert seen and all(prompt.startswith("<user>") and prompt.endswith("<answer>") for prompt in seen)
    assert all("the list of names" in prompt for prompt in seen)


def test_summarize_splits_what_is_too_long(main: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    short, long, binary, empty = (tmp_path / name for name in ("short.txt", "long.txt", "binary", "empty.txt"))
    lines = [f"Line {i} returns a new list of the names that are found." for i in range(150)]
    short.write_text(lines[0])
    long.write_text("\n".join(lines))
    binary.write_bytes(b"\xff\xfe\x00")
    empty.write_text("\n")
    budget = ("--max-num-batched-tokens", 64)
    status, out, err = main("summarize.py", short, long, binary, empty, "--max-tokens", 8, *budget)
    assert status == 1  # two files are left out
    assert f"{binary} is left out" in err and f"{empty} is left out: it is empty" in err
    found = re.findall(r"^--- (\S+): (\d+) tokens; parts: (\d+); prefill chunks: (\d+) or more$", out, re.MULTILINE)
    (first, *_), (second, tokens, parts, chunks), (last, _, combined, _) = found
    assert (first, second, last) == ("short.txt", "long.txt", "long.txt")
    assert int(parts) == -(-int(tokens) // 1010) and int(chunks) >= int(tokens) / 64 and int(combined) == 1
    assert "too long for the context" in out
    prompt_tokens, new, steps, most = re.search(
        r"(\d+) prompt tokens and (\d+) new ones in (\d+) steps of at most (\d+) tokens", out
    ).groups()  # type: ignore[union-attr]
    assert int(most) == 64 and int(steps) >= int(prompt_tokens) / 64
    assert int(new) <= 8 * (2 + int(parts))

    status, out, err = main("summarize.py", short, "--max-tokens", 300)
    assert status == 2 and "--max-tokens 300 leaves" in err


def test_shared_prefix_saves_the_document(main: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = main("shared_prefix.py", "--max-tokens", 4, "--questions", "What is it?", "Who?", "How?")
    assert status == 0
    (all_computed, total, none), (computed, again, saved) = (
        tuple(map(int, found)) for found in re.findall(r"(\d+) of (\d+) prompt tokens computed, (\d+) saved", out)
    )
    assert (all_computed, none) == (total, 0) and again == total == computed + saved
    assert saved > 2 / 3 * 0.95 * total  # two of three questions find the document
    assert re.search(r"^the first token comes [\d.]+ times as early$", out, re.MULTILINE)
    assert out.count("?\n  ") == 3
