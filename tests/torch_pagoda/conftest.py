from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from torch_pagoda import cli
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.link.linker import LinkedProgram

from tiny_models import build_tiny_model

TEXT = [
    "the cat sat on the mat",
    "a list of names is returned",
    "raise ValueError if there is none",
    "one two three",
]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 256 ids: </s> is 0, <pad> is 1, every byte that the texts need has an id."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = sorted({symbol for text in TEXT for symbol, _ in model.pre_tokenizer.pre_tokenize_str(text)})
    trainer = trainers.BpeTrainer(
        vocab_size=256,
        special_tokens=["</s>", "<pad>"],
        initial_alphabet=sorted({letter for symbol in alphabet for letter in symbol}),
        show_progress=False,
    )
    model.train_from_iterator(TEXT * 8, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", pad_token="<pad>", padding_side="left")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A saved tiny llama with a tokenizer, no end token set."""
    folder = tmp_path_factory.mktemp("checkpoint")
    build_tiny_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def llama() -> PreTrainedModel:
    return build_tiny_model("llama")


@pytest.fixture(scope="session")
def reference() -> PreTrainedModel:
    """The same weights as ``llama``, never compiled."""
    return build_tiny_model("llama")


@pytest.fixture
def fast() -> dict[str, Any]:
    """Options of an engine that is built in a second; what they switch off has tests of its own."""
    return {"verify": "off", "codegen": "none", "block_size": 4, "num_blocks": 256}


@pytest.fixture(scope="session")
def programs() -> dict[Any, LinkedProgram]:
    return {}


@pytest.fixture(autouse=True)
def compile_once(monkeypatch: pytest.MonkeyPatch, programs: dict[Any, LinkedProgram]) -> None:
    """Compiling is nearly all of an engine's building time, so each set of weights is compiled once."""

    def build(
        model: PreTrainedModel, options: CompileOptions, *, owns_weights: bool = False, **_: object
    ) -> LinkedProgram:
        weights = tuple(w.double().sum().item() for w in model.state_dict().values())
        key = (type(model), model.dtype, repr(options), weights)
        if key not in programs:
            programs[key] = build_program(model, options, owns_weights=owns_weights)
        program = copy.copy(programs[key])
        program._args = list(program._args)  # each engine binds its own cache
        return program

    monkeypatch.setattr("torch_pagoda.compiled_model.compile_program", build)


@pytest.fixture
def one_line() -> Callable[[BaseException], str]:
    """Checks that an error message is a single line, and returns it."""

    def check(error: BaseException) -> str:
        message = str(error)
        assert message and "\n" not in message
        return message

    return check


PHASES = "torch_pagoda.runtime.phases: "
"""What lines on phases begin with."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Calls ``pagoda`` with the arguments given; yields exit status, stdout, and stderr without lines on phases."""

    def call(*arguments: object) -> tuple[int, str, str]:
        root = logging.getLogger()
        level, handlers, root.handlers = root.level, root.handlers, []  # as in a process of its own
        try:
            with pytest.raises(SystemExit) as ended:
                cli.main([str(argument) for argument in arguments])
        finally:
            root.handlers = handlers
            root.setLevel(level)
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines(keepends=True) if not line.startswith(PHASES)]
        return int(ended.value.code or 0), captured.out, "".join(lines)

    return call
