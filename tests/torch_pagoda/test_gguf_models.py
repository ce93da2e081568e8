"""Models in GGUF files have the parameters that transformers gives them, and are served as these say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import Gguf, all_of, as_llama_cpp, file_of
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

import torch_pagoda as pagoda
from torch_pagoda.checkpoint.configs import load_config
from torch_pagoda.checkpoint.gguf import block_types, checkpoint
from torch_pagoda.checkpoint.gguf.checkpoint import open_gguf
from torch_pagoda.checkpoint.gguf.container import GgufFile
from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight, as_dense

from tiny_models import build_tiny_model

CPU = torch.device("cpu")
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""Rows that are whole blocks of 256."""
OWN: dict[str, dict[str, Any]] = {
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 64},
    "gemma3_text": {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention"] * 2,
    },
    "qwen2_moe": {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
    "qwen3_moe": {"moe_intermediate_size": 256, "norm_topk_prob": True},
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "qwen2_moe", "qwen3_moe")
"""Those that transformers reads from such files, too."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, PreTrainedModel]]:
    """A function of a model's type and of types for its matrices: a file, and the model that is in it."""
    made: dict[tuple[str, str, str], tuple[Path, PreTrainedModel]] = {}

    def write(model_type: str, kind: str, rest: str = "") -> tuple[Path, PreTrainedModel]:
        key = model_type, kind, rest
        if key not in made:
            model = build_tiny_model(model_type, **SIZES, **OWN.get(model_type, {}))
            path = tmp_path_factory.mktemp(f"{model_type}-{kind}") / "model.gguf"
            kinds = as_llama_cpp(kind, rest) if rest else all_of(kind)
            made[key] = file_of(model, kinds).write(path), model
        return made[key]

    return write


def of_transformers(path: Path) -> PreTrainedModel:
    """What transformers loads of the file, in float32, over a config that lacks nothing of the architecture."""
    _, config = load_config(path, False)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, config=config)
    return model.eval()


def of_ours(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(path, "float32", False, CPU).named_parameters())


def differing(path: Path, expected: PreTrainedModel) -> list[str]:
    found = of_ours(path)
    wanted = dict(expected.named_parameters())
    assert found.keys() == wanted.keys()
    return [key for key, parameter in found.items() if not torch.equal(as_dense(parameter), wanted[key])]


QUICK = ("llama", "gemma2", "phi3", "qwen3_moe")


def some(names: Sequence[str], quick: Sequence[str]) -> list[Any]:
    """All of them, those that are not quick marked as slow."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("model_type", some(ARCHITECTURES, QUICK))
@pytest.mark.parametrize(("kind", "rest"), [("Q4_0", "Q6_K"), pytest.param("Q8_0", "", marks=pytest.mark.slow)])
def test_parameters_are_those_of_transformers(
    written: Callable[..., tuple[Path, PreTrainedModel]], model_type: str, kind: str, rest: str
) -> None:
    path, model = written(model_type, kind, rest)
    assert differing(path, of_transformers(path)) == []
    stored = sum(isinstance(parameter, StoredWeight) for parameter in of_ours(path).values())
    matrices = sum(parameter.dim() > 1 for parameter in model.parameters())
    floats = sum("gate" in name and parameter.shape[0] in (1, 8) for name, parameter in model.named_parameters())
    assert stored >= matrices - floats - ("moe" in model_type)


OTHERS = ("Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32")


@pytest.mark.parametrize("kind", some(OTHERS, ("Q4_K", "F16")))
def test_so_they_are_of_other_types(written: Callable[..., tuple[Path, PreTrainedModel]], kind: str) -> None:
    path, _ = written("llama", kind)
    assert differing(path, of_transformers(path)) == []


def test_gemma_of_the_first_kind(written: Callable[..., tuple[Path, PreTrainedModel]]) -> None:
    """transformers reads no such file: what was written is compared."""
    path, model = written("gemma", "F32")
    wanted = dict(model.named_parameters())
    for key, parameter in of_ours(path).items():
        # 1 was added to norms and taken away again.
        assert (parameter - wanted[key]).abs().max() <= (2**-22 if "norm" in key else 0), key


@pytest.mark.parametrize("model_type", some(ARCHITECTURES, QUICK))
def test_the_config_says_what_transformers_reads(
    written: Callable[..., tuple[Path, PreTrainedModel]], model_type: str
) -> None:
    path, model = written(model_type, "Q4_0", "Q6_K")
    theirs = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    ours = open_gguf(path).config()
    assert type(ours) is type(theirs) is type(model.config)
    table = {"gemma3_text": "gemma3"}.get(model_type, model_type)
    for name in filter(None, GGUF_CONFIG_MAPPING[table].values()):
        if name == "rope_theta":
            assert ours.rope_parameters == model.config.rope_parameters
        else:
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name)), name
    said, meant = ours.to_dict(), model.config.to_dict()
    aside = {"dtype", "architectures", "_name_or_path", "transformers_version", "head_dim"}
    aside |= {"bos_token_id", "eos_token_id", "pad_token_id", "original_max_position_embeddings"}
    assert {key for key in said if said[key] != meant[key]} <= aside


def check_tokens(path: Path, reference: PreTrainedModel, **options: Any) -> pagoda.LLM:
    llm = pagoda.LLM(path, dtype="float32", block_size=4, num_blocks=64, **options)
    assert llm.compile_report.verdict is not None and llm.compile_report.verdict.tolerance < 1e-2
    prompts = [list(range(5, 5 + n)) for n in (3, 17, 40)]
    outputs = llm.generate(prompts, pagoda.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()
    return llm


SERVED = {
    "llama": ("Q4_0", "Q6_K", 9),
    "qwen2": ("Q8_0", "", 9),
    "gemma3_text": ("Q8_0", "Q6_K", 8),
    "qwen3_moe": ("Q4_K", "Q6_K", 5),
    "qwen3": ("Q4_K", "Q6_K", 9),
    "phi3": ("Q5_K", "Q6_K", 9),
}


@pytest.mark.parametrize("model_type", some(list(SERVED), ("llama", "qwen3")))
def test_served_as_transformers_serves_it(
    written: Callable[..., tuple[Path, PreTrainedModel]], model_type: str
) -> None:
    kind, rest, linears = SERVED[model_type]
    path, _ = written(model_type, kind, rest)
    llm = check_tokens(path, of_transformers(path))
    reads = {record.name: record.matches for record in llm.compile_report.passes}
    assert reads["stored_linears"] >= linears
    assert reads["quantize_experts"] == (2 if "moe" in model_type else 0)


# Mutants of the reader.


def shifted(read: Callable[[str], GgufFile]) -> Callable[[str], GgufFile]:
    """The last matrix of queries begins a row further on."""

    def of(path: str) -> GgufFile:
        found = read(path)
        tensors = dict(found.tensors)
        tensor = tensors["blk.1.attn_q.weight"]
        tensors[tensor.name] = replace(tensor, begin=tensor.begin + tensor.nbytes // tensor.shape[0])
        return replace(found, tensors=tensors)

    return of


def turned(read: Callable[[str], GgufFile]) -> Callable[[str], GgufFile]:
    """Sizes in the order of the file."""

    def of(path: str) -> GgufFile:
        found = read(path)
        tensors = {name: replace(one, shape=tuple(reversed(one.shape))) for name, one in found.tensors.items()}
        return replace(found, tensors=tensors)

    return of


def one_scale(take_apart: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def of(blocks: torch.Tensor) -> Any:
        found = take_apart(blocks)
        scales = found.scales.clone()
        scales[0] *= 1.01
        return replace(found, scales=scales)

    return of


@pytest.fixture(autouse=True)
def forget_heads() -> Iterator[None]:
    """Heads are read anew: a mutant may have read them."""
    checkpoint._opened.cache_clear()
    yield
    checkpoint._opened.cache_clear()


def test_mutants_of_the_reader_show(
    written: Callable[..., tuple[Path, PreTrainedModel]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = written("llama", "Q4_0", "Q6_K")
    expected = of_transformers(path)

    def differs(owner: Any, name: str, value: object) -> list[str]:
        checkpoint._opened.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            return differing(path, expected)

    # Not a permutation of queries and keys: those of all layers, and nothing else.
    left_out = differs(checkpoint, "_apart", lambda rows, heads: rows)
    assert left_out == [f"model.layers.{i}.self_attn.{part}_proj.weight" for i in (0, 1) for part in "qk"]
    assert differs(checkpoint, "read_gguf", shifted(checkpoint.read_gguf)) == [
        "model.layers.1.self_attn.q_proj.weight"
    ]
    with pytest.raises(ValueError, match=r"'blk.0.attn_k.weight' has shape \[256, 128\], but"):
        differs(checkpoint, "read_gguf", turned(checkpoint.read_gguf))
    nibbles = block_types._nibbles
    assert len(differs(block_types, "_nibbles", lambda data, run: nibbles(data >> 4 | data << 4, run))) == 16
    q4_0 = block_types.BLOCK_TYPES[2]
    assert q4_0.take_apart is not None
    mutant = {**block_types.BLOCK_TYPES, 2: replace(q4_0, take_apart=one_scale(q4_0.take_apart))}
    from torch_pagoda.checkpoint.gguf import container

    assert len(differs(container, "BLOCK_TYPES", mutant)) == 14


# What a file says and the tensors do not bear out, or what is not read.


def change(key: str, value: Any) -> Callable[[Gguf], object]:
    return lambda file: file.metadata.update({key: value})


def drop(key: str) -> Callable[[Gguf], object]:
    return lambda file: file.metadata.pop(key)


def without(name: str) -> Callable[[Gguf], object]:
    return lambda file: file.tensors.remove(file.tensor(name))


def renamed(name: str, other: str) -> Callable[[Gguf], object]:
    return lambda file: setattr(file.tensor(name), "name", other)


def with_nan(file: Gguf) -> None:
    tensor = file.tensor("blk.1.ffn_up.weight")
    tensor.data = tensor.data[:18] + b"\x00\x7e" + tensor.data[20:]


def as_kind(name: str, kind: str) -> Callable[[Gguf], object]:
    return lambda file: setattr(file.tensor(name), "kind", kind)


WRONG: dict[str, tuple[Callable[[Gguf], object], str]] = {
    "an architecture that is not read": (change("general.architecture", "rwkv7"), "'rwkv7' is not supported"),
    "no architecture": (drop("general.architecture"), "'general.architecture' is None"),
    "no width": (drop("llama.embedding_length"), "'llama.embedding_length' is missing"),
    "another width": (change("llama.embedding_length", 32), "embedding_length contradicts"),
    "a width in words": (change("llama.embedding_length", "wide"), "'llama.embedding_length' is 'wide'"),
    "more layers": (change("llama.block_count", 3), "block_count is 3"),
    "other heads": (change("llama.attention.head_count", 2), "'blk.0.attn_q.weight' has shape [64, 64]"),
    "odd heads": (change("llama.attention.head_count_kv", 3), "not a multiple of its 3"),
    "heads by layer": (change("llama.attention.head_count", [4, 2]), "differs between layers"),
    "another vocabulary": (change("llama.vocab_size", 255), "states 255 tokens"),
    "an end that is not a token": (change("tokenizer.ggml.eos_token_id", 256), "is 256, not an id below 256"),
    "no epsilon": (drop("llama.attention.layer_norm_rms_epsilon"), "is missing"),
    "an epsilon of 0": (
        change("llama.attention.layer_norm_rms_epsilon", 0.0),
        "is 0.0; expected a finite number above 0",
    ),
    "a rotation of half a head": (change("llama.rope.dimension_count", 8), "rotating only 8 of 16"),
    "positions scaled somehow": (change("llama.rope.scaling.type", "warped"), "rope.scaling.type='warped'"),
    "what nobody reads": (change("llama.logit_scale", 2.0), "'llama.logit_scale' is 2.0, which is not supported"),
    "experts of Mixtral": (change("llama.expert_count", 8), "experts of Mixtral's kind"),
    "a part of several": (change("split.count", 2), "one of several parts"),
    "a missing weight": (without("blk.1.ffn_up.weight"), "'blk.1.ffn_up.weight' of llama is missing"),
    "a weight of another model": (
        renamed("blk.1.ffn_norm.weight", "blk.1.ssm_norm.weight"),
        "'blk.1.ffn_norm.weight'",
    ),
    "a scale that is NaN": (with_nan, "a scale in tensor 'blk.1.ffn_up.weight' is NaN or infinite"),
    "a type that is not read": (as_kind("blk.1.ffn_up.weight", "IQ2_XXS"), "not whole blocks"),
}


@pytest.fixture(scope="module")
def narrow() -> Callable[[], Gguf]:
    """A function that makes a file of the tiny llama, 64 wide, that may be changed."""
    model = build_tiny_model("llama")
    return lambda: file_of(model, all_of("Q4_0"))


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_refused_by_name(
    case: str, narrow: Callable[[], Gguf], tmp_path: Path, one_line: Callable[[BaseException], str]
) -> None:
    spoil, words = WRONG[case]
    file = narrow()
    spoil(file)
    path = file.write(tmp_path / "model.gguf")
    with pytest.raises(ValueError) as error:
        load_model(path, "auto", False, CPU, load_config(path, False)[1])
    message = one_line(error.value)
    assert message.startswith(f"model={str(path)!r}: ") and words in message, message


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    file = file_of(build_tiny_model("llama", **SIZES), all_of("Q4_K"))
    tensor = file.tensor("blk.1.ffn_up.weight")
    tensor.kind, tensor.data = "IQ2_XXS", bytes(256 * 66)
    path = file.write(tmp_path / "model.gguf")
    with pytest.raises(
        ValueError, match=r"'blk.1.ffn_up.weight' has the unsupported type IQ2_XXS; supported: Q4_0, "
    ):
        load_config(path, False)
