from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LlamaModel,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    TextIteratorStreamer,
    pipeline,
)

import torch_pagoda as pagoda
from torch_pagoda.generation import PagedGeneration, paged_generation

PAD = 0


@pytest.fixture
def compiled(llama: PreTrainedModel, fast: dict[str, Any]) -> PreTrainedModel:
    return pagoda.compile(llama, **fast)


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Three rows of width 9, padded on the left by 4, 1 and 0."""
    ids = torch.randint(3, 256, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, padding in enumerate((4, 1, 0)):
        ids[row, :padding] = PAD
        mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def some_eos(reference: PreTrainedModel, batch: dict[str, torch.Tensor]) -> list[int]:
    """Two tokens that end the first two rows early."""
    ids = reference.generate(**batch, max_new_tokens=12, do_sample=False)
    return [int(ids[0, 12]), int(ids[1, 16])]


@pytest.fixture
def no_fallback() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not paged.*")
        yield


def engine_of(model: PreTrainedModel) -> Any:
    generation = paged_generation(model)
    assert generation is not None
    return generation.llm.engine


def assert_nothing_left(model: PreTrainedModel) -> None:
    stats = engine_of(model).stats()
    assert not engine_of(model).has_unfinished() and stats["blocks_used"] == 0


class TokenModulo:
    """A stopping criterion of one's own: the last token is 3 modulo 7."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 7 == 3


class Recorder:
    """A streamer that writes down what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 12},
        {"max_length": 15},
        {},
        {"max_new_tokens": 12, "eos": True},
        {"max_new_tokens": 12, "eos": True, "min_new_tokens": 6},
        {"max_length": 20, "eos": True, "min_length": 14},
        {"max_new_tokens": 12, "repetition_penalty": 1.4},
        {"max_new_tokens": 12, "stopping_criteria": [TokenModulo()]},
        {"max_new_tokens": 12, "stopping_criteria": [TokenModulo()], "eos": True},
        {"max_new_tokens": 12, "max_time": 100.0},
        {"max_new_tokens": 5, "use_cache": False},
        {"generation_config": GenerationConfig(max_new_tokens=7, repetition_penalty=1.2)},
        {"max_new_tokens": 3, "do_sample": True, "top_k": 1},
    ],
    ids=lambda arguments: ",".join(arguments) or "defaults",
)
def test_same_tensor_as_transformers(
    compiled: PreTrainedModel,
    reference: PreTrainedModel,
    batch: dict[str, torch.Tensor],
    some_eos: list[int],
    arguments: dict[str, Any],
) -> None:
    arguments = dict(arguments)
    if arguments.pop("eos", False):
        arguments |= {"eos_token_id": some_eos, "pad_token_id": 2}
    ours, theirs = compiled.generate(**batch, **arguments), reference.generate(**batch, **arguments)
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert_nothing_left(compiled)


@pytest.mark.usefixtures("no_fallback")
def test_model_generation_config_is_honored(
    compiled: PreTrainedModel, reference: PreTrainedModel, batch: dict[str, torch.Tensor], some_eos: list[int]
) -> None:
    reference = copy.deepcopy(reference)
    for model in (compiled, reference):
        model.generation_config.update(eos_token_id=some_eos, pad_token_id=1, max_new_tokens=9)
    assert torch.equal(compiled.generate(**batch), reference.generate(**batch))


@pytest.mark.usefixtures("no_fallback")
def test_mask_is_inferred_from_the_pad_token(
    compiled: PreTrainedModel, reference: PreTrainedModel, batch: dict[str, torch.Tensor]
) -> None:
    arguments = {"input_ids": batch["input_ids"], "pad_token_id": PAD, "max_new_tokens": 5}
    assert torch.equal(compiled.generate(**arguments), reference.generate(**arguments))


@pytest.mark.usefixtures("no_fallback")
def test_one_row_and_positional_input(compiled: PreTrainedModel, reference: PreTrainedModel) -> None:
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(compiled.generate(ids, max_new_tokens=4), reference.generate(ids, max_new_tokens=4))


@pytest.mark.usefixtures("no_fallback")
def test_sampling_follows_the_global_seed(compiled: PreTrainedModel, batch: dict[str, torch.Tensor]) -> None:
    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return compiled.generate(
            **batch, do_sample=True, temperature=1.5, top_p=0.99, num_return_sequences=3, max_new_tokens=8
        )

    first = draw(1)
    assert first.shape == (9, 17)
    assert torch.equal(first[:, :9], batch["input_ids"].repeat_interleave(3, dim=0))
    assert torch.equal(first, draw(1)) and not torch.equal(first, draw(2))
    assert len({tuple(row) for row in first[:3].tolist()}) > 1


@pytest.mark.usefixtures("no_fallback")
def test_sampling_keeps_to_top_k(compiled: PreTrainedModel, reference: PreTrainedModel) -> None:
    ids = torch.tensor([[5, 6, 7]])
    allowed = set(reference(ids).logits[0, -1].topk(3).indices.tolist())
    drawn = compiled.generate(
        ids, do_sample=True, top_k=3, temperature=3.0, num_return_sequences=32, max_new_tokens=1
    )
    found = set(drawn[:, -1].tolist())
    assert found <= allowed and len(found) > 1


@pytest.mark.usefixtures("no_fallback")
def test_streamer_gets_the_same_columns(
    compiled: PreTrainedModel, reference: PreTrainedModel, batch: dict[str, torch.Tensor], some_eos: list[int]
) -> None:
    got = []
    for model in (compiled, reference):
        recorder = Recorder()
        model.generate(**batch, max_new_tokens=10, eos_token_id=some_eos, pad_token_id=PAD, streamer=recorder)
        got.append(recorder.got)
    assert got[0] == got[1] and got[0][-1] == "end"
    assert_nothing_left(compiled)


@pytest.mark.usefixtures("no_fallback")
def test_text_streamer_and_stop_strings(
    compiled: PreTrainedModel, reference: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    inputs = tokenizer(["the cat"], return_tensors="pt", return_token_type_ids=False)
    whole = reference.generate(**inputs, max_new_tokens=10)
    streamer = TextIteratorStreamer(tokenizer)
    compiled.generate(**inputs, max_new_tokens=10, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(whole[0])
    stop = tokenizer.decode(whole[0, inputs["input_ids"].shape[1] + 4])
    arguments = inputs | {"max_new_tokens": 10, "stop_strings": [stop], "tokenizer": tokenizer}
    stopped = compiled.generate(**arguments)
    assert torch.equal(stopped, reference.generate(**arguments)) and stopped.shape[1] < whole.shape[1]
    with pytest.raises(ValueError, match="tokenizer"):
        compiled.generate(**inputs, stop_strings=[stop])


@pytest.mark.usefixtures("no_fallback")
def test_return_dict(compiled: PreTrainedModel, reference: PreTrainedModel, batch: dict[str, torch.Tensor]) -> None:
    arguments = batch | {"max_new_tokens": 4, "return_dict_in_generate": True}
    ours, theirs = compiled.generate(**arguments), reference.generate(**arguments)
    assert type(ours) is type(theirs) and torch.equal(ours.sequences, theirs.sequences)


class AddOne(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.arange(scores.shape[-1]) % 3


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"logits_processor": LogitsProcessorList([AddOne()])}, "logits_processor"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [4, 5]}, "prefix_allowed_tokens_fn"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
        ({"bad_words_ids": [[7]]}, "NoBadWords"),
        ({"suppress_tokens": [7]}, "SuppressTokens"),
        ({"sequence_bias": [[[7], 2.0]]}, "SequenceBias"),
        ({"guidance_scale": 1.5}, "Guidance"),
        ({"do_sample": True, "typical_p": 0.9}, "Typical"),
        ({"do_sample": True, "min_p": 0.1, "top_p": 0.7}, "min_p after top_p"),
        ({"do_sample": True, "epsilon_cutoff": 0.01}, "Epsilon"),
        ({"prompt_lookup_num_tokens": 2, "one_row": True}, "assisted generation"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"output_scores": True, "return_dict_in_generate": True}, "scores"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden_states"),
        ({"position_ids": torch.arange(9)[None].expand(3, -1) + 3}, "position_ids"),
        ({"max_new_tokens": 5000}, "max_model_len"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_engine_does_not_do_goes_to_transformers_with_one_warning(
    compiled: PreTrainedModel,
    reference: PreTrainedModel,
    batch: dict[str, torch.Tensor],
    arguments: dict[str, Any],
    word: str,
) -> None:
    arguments = {"max_new_tokens": 5} | arguments
    if arguments.pop("one_row", False):
        batch = {name: tensor[2:] for name, tensor in batch.items()}
    if word == "max_model_len":
        arguments |= {
            "stopping_criteria": [TokenModulo()],
            "eos_token_id": list(range(3, 256)),
            "pad_token_id": 0,
        }
    results = []
    for model in (compiled, reference):
        torch.manual_seed(5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                torch.manual_seed(5)
                output = model.generate(**batch, **arguments)
        results.append(output if isinstance(output, torch.Tensor) else output.sequences)
        ours = [str(entry.message) for entry in caught if "not paged" in str(entry.message)]
        if model is compiled:
            assert len(ours) == 1 and word in ours[0]
            assert next(e.filename for e in caught if "not paged" in str(e.message)) == __file__
    assert torch.equal(*results)


@pytest.mark.parametrize("lengths", ["none", "of all rows", "of a prompt"])
def test_a_repetition_penalty_that_does_not_count_the_prompts_goes_to_transformers(
    compiled: PreTrainedModel,
    reference: PreTrainedModel,
    batch: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    lengths: str,
) -> None:
    made = RepetitionPenaltyLogitsProcessor.__init__
    ignored = {"none": None, "of all rows": 2, "of a prompt": torch.tensor([4, 1, 3])}[lengths]

    def init(self: Any, penalty: float, prompt_ignore_length: Any = None) -> None:
        made(self, penalty, ignored)

    # None is what transformers before 5.23 passes: its processor counts the padding.
    monkeypatch.setattr(RepetitionPenaltyLogitsProcessor, "__init__", init)
    arguments = {"max_new_tokens": 12, "repetition_penalty": 1.4}
    with pytest.warns(UserWarning, match="repetition_penalty counts all prompt tokens and no padding"):
        ours = compiled.generate(**batch, **arguments)
    assert torch.equal(ours, reference.generate(**batch, **arguments))
    if lengths == "none":
        whole = {name: tensor[2:] for name, tensor in batch.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*not paged.*")
            assert torch.equal(compiled.generate(**whole, **arguments), reference.generate(**whole, **arguments))


@pytest.mark.usefixtures("no_fallback")
def test_only_the_ends_of_the_call_are_held_back(
    llama: PreTrainedModel, fast: dict[str, Any], reference: PreTrainedModel, batch: dict[str, torch.Tensor]
) -> None:
    tokens = reference.generate(**batch, max_new_tokens=12)[:, 9:]
    ends_of_model, end = tokens[:, 0].tolist(), int(tokens[0, 4])
    model = copy.deepcopy(llama)
    model.generation_config.eos_token_id = ends_of_model
    compiled = pagoda.compile(model, **fast)
    assert engine_of(compiled).eos_token_ids == set(ends_of_model)
    arguments = {"max_new_tokens": 12, "min_new_tokens": 8, "eos_token_id": end, "pad_token_id": 2}
    assert torch.equal(compiled.generate(**batch, **arguments), reference.generate(**batch, **arguments))


def test_embeddings_and_caches_go_to_transformers(
    compiled: PreTrainedModel, reference: PreTrainedModel, batch: dict[str, torch.Tensor]
) -> None:
    embeddings = reference.get_input_embeddings()(batch["input_ids"])
    arguments = {"inputs_embeds": embeddings, "attention_mask": batch["attention_mask"], "max_new_tokens": 4}
    with pytest.warns(UserWarning, match="inputs_embeds"):
        assert torch.equal(compiled.generate(**arguments), reference.generate(**arguments))
    first = reference.generate(**batch, max_new_tokens=4, return_dict_in_generate=True)
    again = {"input_ids": first.sequences, "past_key_values": first.past_key_values, "max_new_tokens": 2}
    with pytest.warns(UserWarning, match="past_key_values"):
        compiled.generate(**again)


def test_train_mode_goes_to_transformers(
    compiled: PreTrainedModel, reference: PreTrainedModel, batch: dict[str, torch.Tensor]
) -> None:
    compiled.train()
    with pytest.warns(UserWarning, match="torch.inference_mode"):
        found = compiled.generate(**batch, max_new_tokens=2)
    assert torch.equal(found, reference.generate(**batch, max_new_tokens=2))
    assert paged_generation(compiled)._llm is None  # type: ignore[union-attr]
    compiled.eval()


@pytest.mark.parametrize(
    ("row", "word"), [([1, 1, 0] + [1] * 6, "holes"), ([1] * 8 + [0], "padding"), ([0] * 9, "every token")]
)
def test_mask_that_is_not_left_padding_raises(
    compiled: PreTrainedModel, batch: dict[str, torch.Tensor], row: list[int], word: str
) -> None:
    batch["attention_mask"][2] = torch.tensor(row)
    with pytest.raises(ValueError, match=rf"attention_mask\[2\].*{word}.*left"):
        compiled.generate(**batch, max_new_tokens=2)
    assert_nothing_left(compiled)


def test_typo_raises_as_in_transformers(compiled: PreTrainedModel, batch: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="max_new_token"):
        compiled.generate(**batch, max_new_token=2)


def test_failure_of_one_row_leaves_the_engine_empty(
    compiled: PreTrainedModel, batch: dict[str, torch.Tensor]
) -> None:
    compiled.generate(**batch, max_new_tokens=2)
    batch["input_ids"][1, 5] = 999
    with pytest.raises((ValueError, IndexError), match="999"):
        compiled.generate(**batch, max_new_tokens=2)
    assert_nothing_left(compiled)

    class Interrupts:
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            raise KeyboardInterrupt

    batch["input_ids"][1, 5] = 99
    with pytest.raises(KeyboardInterrupt):
        compiled.generate(**batch, max_new_tokens=5, stopping_criteria=[Interrupts()])
    assert_nothing_left(compiled)


def test_compile_is_idempotent_and_can_be_undone(llama: PreTrainedModel, fast: dict[str, Any]) -> None:
    assert pagoda.compile(llama, **fast) is llama
    first = paged_generation(llama)
    assert isinstance(first, PagedGeneration)
    for options in (fast, {}):
        assert pagoda.compile(llama, **options) is llama and paged_generation(llama) is first
    pagoda.compile(llama, **fast | {"block_size": 8})
    second = paged_generation(llama)
    assert second is not first and second is not None and second.options["block_size"] == 8
    assert pagoda.restore(llama) is llama
    assert paged_generation(llama) is None and "generate" not in vars(llama)
    pagoda.restore(llama)


@pytest.mark.usefixtures("no_fallback")
def test_replaced_weights_raise_until_compiled_again(
    compiled: PreTrainedModel, reference: PreTrainedModel, batch: dict[str, torch.Tensor]
) -> None:
    compiled.generate(**batch, max_new_tokens=2)
    first = paged_generation(compiled)
    changed = copy.deepcopy(reference)
    with torch.no_grad():
        changed.get_output_embeddings().weight.neg_()
    compiled.load_state_dict({k: v.clone() for k, v in changed.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match="replaced or moved after the model was compiled"):
        compiled.generate(**batch, max_new_tokens=3)
    again = paged_generation(pagoda.compile(compiled))
    assert first is not None and again is not None and again is not first and again.options == first.options
    assert torch.equal(compiled.generate(**batch, max_new_tokens=3), changed.generate(**batch, max_new_tokens=3))


def test_a_bad_token_id_names_its_row(compiled: PreTrainedModel, batch: dict[str, torch.Tensor]) -> None:
    batch["input_ids"][1, 5] = 999
    with pytest.raises(ValueError, match=r"input_ids\[1\]\[4\]=999 is outside the vocabulary"):
        compiled.generate(**batch, max_new_tokens=2)
    assert_nothing_left(compiled)


@pytest.mark.usefixtures("no_fallback")
def test_copies_and_pickles_have_an_engine_of_their_own(
    compiled: PreTrainedModel, reference: PreTrainedModel, batch: dict[str, torch.Tensor]
) -> None:
    compiled.generate(**batch, max_new_tokens=2)
    changed = copy.deepcopy(reference)
    with torch.no_grad():
        changed.get_output_embeddings().weight.neg_()
    expected = changed.generate(**batch, max_new_tokens=3)
    for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        generation = paged_generation(other)
        assert generation is not None and generation.model is other
        with torch.no_grad():
            other.get_output_embeddings().weight.neg_()
        assert torch.equal(other.generate(**batch, max_new_tokens=3), expected)


@pytest.mark.usefixtures("no_fallback")
def test_pipeline_and_isinstance(
    compiled: PreTrainedModel, reference: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert type(compiled) is type(reference)
    texts = []
    for model in (compiled, reference):
        run = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=2)
        found = run(["the cat", "a list of names is"], max_new_tokens=6, do_sample=False)
        texts.append([entry[0]["generated_text"] for entry in found])
    assert texts[0] == texts[1]
    assert paged_generation(compiled)._llm is not None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"blok_size": 3}, r"'blok_size' \(given 3\)"),
        ({"block_size": 0}, "block_size=0"),
        ({"verify": "x"}, "verify='x'"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' differs"),
        ({"num_blocks": 4, "kv_cache_memory": "1MiB"}, "num_blocks=4 and kv_cache_memory='1MiB'"),
    ],
)
def test_bad_options_raise_at_once(llama: PreTrainedModel, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        pagoda.compile(llama, **options)
    assert paged_generation(llama) is None


def test_what_is_not_a_causal_lm_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="Linear"):
        pagoda.compile(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="causal LM"):
        pagoda.compile(LlamaModel(llama.config))
