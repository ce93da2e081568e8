from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaModel, PreTrainedModel, PreTrainedTokenizerFast, T5Config

import torch_pagoda as pagoda
from torch_pagoda.runtime.ops.linear.packed_linear import can_pack
from torch_pagoda.runtime.requests.outputs import Progress

from tiny_models import build_tiny_model

GREEDY = pagoda.SamplingParams(max_tokens=8, temperature=0)


def greedy_tokens(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return output[0, len(prompt) :].tolist()


@pytest.fixture
def llm(checkpoint: Path, fast: dict[str, Any]) -> pagoda.LLM:
    return pagoda.LLM(checkpoint, **fast)


def test_generates_the_tokens_of_transformers_from_text_and_ids(
    llm: pagoda.LLM, reference: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompts = [
        "the cat",
        [5, 9, 11, 40, 41, 42, 7],
        torch.tensor([3]),
        "one two three is returned if there is none",
    ]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == [prompts[0], None, None, prompts[3]]
    assert outputs[2].prompt_token_ids == [3]
    for output in outputs:
        completion = output.outputs[0]
        assert completion.token_ids == greedy_tokens(reference, output.prompt_token_ids, 8)
        assert completion.finish_reason == "length"
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert output.finished and output.metrics.ttft is not None and output.metrics.ttft > 0


def test_takes_one_prompt_and_params_per_prompt(llm: pagoda.LLM) -> None:
    assert len(llm.generate("the cat", GREEDY)) == 1
    assert llm.generate([5, 6, 7], GREEDY)[0].prompt_token_ids == [5, 6, 7]
    assert llm.generate(torch.tensor([5, 6, 7]), GREEDY)[0].prompt_token_ids == [5, 6, 7]
    lengths = [1, 5, 3]
    each = [pagoda.SamplingParams(max_tokens=n, temperature=0) for n in lengths]
    outputs = llm.generate([[5, 6]] * 3, each)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths


def test_reports_progress(llm: pagoda.LLM) -> None:
    seen: list[Progress] = []
    llm.generate([[5, 6], [7]], GREEDY, on_progress=seen.append)
    assert seen[-1].finished == seen[-1].total == 2
    assert seen[-1].generated_tokens == 16


def test_stream_yields_what_generate_returns(llm: pagoda.LLM) -> None:
    whole = llm.generate("a list of", GREEDY)[0].outputs[0]
    pieces = list(llm.stream("a list of", GREEDY))
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finished for piece in pieces][-1] and pieces[-1].finish_reason == "length"


def test_submit_step_and_cancel(llm: pagoda.LLM) -> None:
    kept, dropped = llm.submit([5, 6, 7], GREEDY), llm.submit([8, 9], GREEDY, "mine")
    assert dropped == "mine" and llm.has_unfinished()
    llm.step()
    assert llm.cancel(dropped) and not llm.cancel("nobody")
    finished = {}
    while llm.has_unfinished():
        finished |= {output.request_id: output for output in llm.step() if output.finished}
    assert finished[kept].outputs[0].token_ids == llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids
    assert llm.engine.block_manager.num_available_blocks == 256


def test_defragmenting_moves_blocks_and_changes_no_token(llm: pagoda.LLM, reference: PreTrainedModel) -> None:
    long, short = list(range(5, 25)), [8, 9, 10, 11]
    llm.submit(long, pagoda.SamplingParams(max_tokens=1, temperature=0))
    kept = llm.submit(short, GREEDY)
    llm.step()
    llm.reset_prefix_cache()
    before = max(llm.engine.block_manager.table(kept))
    assert llm.defragment() > 0 and max(llm.engine.block_manager.table(kept)) < before
    outputs = {}
    while llm.has_unfinished():
        outputs |= {output.request_id: output for output in llm.step()}
    assert outputs[kept].outputs[0].token_ids == greedy_tokens(reference, short, 8)
    assert llm.stats()["blocks_moved"] > 0 and llm.defragment() == 0


def test_bad_prompt_is_named_by_its_index_before_any_runs(
    llm: pagoda.LLM, one_line: Callable[[BaseException], str]
) -> None:
    steps = llm.engine.stats()["steps"]
    with pytest.raises((ValueError, TypeError)) as error:
        llm.generate([[5, 6], [5, 999]], GREEDY)
    assert "1" in one_line(error.value) and "999" in str(error.value)
    assert llm.engine.stats()["steps"] == steps and not llm.has_unfinished()


def test_live_module_keeps_its_weights(
    llama: PreTrainedModel, reference: PreTrainedModel, fast: dict[str, Any]
) -> None:
    before = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
    live = pagoda.LLM(llama, **fast)
    assert live.tokenizer is None
    assert live.generate([[4, 5, 6]], GREEDY)[0].outputs[0].token_ids == greedy_tokens(reference, [4, 5, 6], 8)
    after = llama.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="no packed bf16 products on this CPU")
def test_packed_weights_that_are_written_to_raise(fast: dict[str, Any]) -> None:
    model = build_tiny_model("llama", dtype=torch.bfloat16)
    live = pagoda.LLM(model, **fast, pack_weights=True)
    assert live.program.copied_weights  # type: ignore[attr-defined]
    live.generate([[4, 5, 6]], GREEDY)
    model.load_state_dict(build_tiny_model("llama", seed=1, dtype=torch.bfloat16).state_dict())
    with pytest.raises(RuntimeError, match=r"was written to .* a packed copy of it"):
        live.generate([[4, 5, 6]], GREEDY)


def test_parameters_behind_folded_constants_that_are_written_to_raise(fast: dict[str, Any]) -> None:
    model = build_tiny_model("apertus")
    live = pagoda.LLM(model, **fast)
    live.generate([[4, 5, 6]], GREEDY)
    with torch.no_grad():
        model.model.layers[0].mlp.act_fn.alpha_p.add_(1)
    with pytest.raises(RuntimeError, match=r"alpha_p' of .* was written to .* constants computed from it"):
        live.generate([[4, 5, 6]], GREEDY)


def test_eos_of_the_generation_config_ends_a_request(llama: PreTrainedModel, fast: dict[str, Any]) -> None:
    plain = pagoda.LLM(llama, **fast).generate([[4, 5, 6]], GREEDY)[0].outputs[0].token_ids
    llama.generation_config.eos_token_id = [250, plain[3]]
    ended = pagoda.LLM(llama, **fast).generate([[4, 5, 6]], GREEDY)[0].outputs[0]
    assert ended.token_ids == plain[: plain.index(plain[3]) + 1] and ended.finish_reason == "stop"


def test_dtype_of_the_checkpoint_or_the_one_asked_for(checkpoint: Path, fast: dict[str, Any]) -> None:
    assert pagoda.LLM(checkpoint, **fast).program.caches[0].dtype == torch.float32
    assert pagoda.LLM(checkpoint, dtype="bfloat16", **fast).program.caches[0].dtype == torch.bfloat16


def test_default_verification_passes_and_is_reported(checkpoint: Path) -> None:
    report = pagoda.LLM(checkpoint, codegen="none").compile_report
    assert report.verdict is not None and report.verdict.ok
    assert report.attention_recognized == report.attention_total == 2


def test_max_model_len_is_what_the_model_and_the_cache_allow(
    llama: PreTrainedModel, fast: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "torch_pagoda"):
        assert pagoda.LLM(llama, **fast).engine.max_model_len == 512
        assert pagoda.LLM(llama, **fast | {"num_blocks": 8}).engine.max_model_len == 32
    lines = [record.getMessage() for record in caplog.records if "max_model_len" in record.getMessage()]
    assert len(lines) == 2 and "32" in lines[1]
    assert pagoda.LLM(llama, **fast, max_model_len=100).engine.max_model_len == 100


def test_kv_cache_memory_sizes_the_cache(llama: PreTrainedModel, fast: dict[str, Any]) -> None:
    # 2 layers, 2 KV heads of 16, keys and values, 4 bytes, 4 tokens per block.
    per_block = 2 * 2 * 16 * 2 * 4 * 4
    del fast["num_blocks"]
    assert pagoda.LLM(llama, **fast, kv_cache_memory=10 * per_block + 5).engine.stats()["blocks_total"] == 10
    assert pagoda.LLM(llama, **fast, kv_cache_memory="1MiB").engine.stats()["blocks_total"] == 2**20 // per_block
    assert pagoda.LLM(llama, **fast, max_num_seqs=3).engine.stats()["blocks_total"] == 3 * 512 // 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cuda"}, ("device='cuda'", "cpu")),
        ({"device": "tpu:0"}, ("device='tpu:0'",)),
        ({"dtype": "int8"}, ("dtype='int8'", "bfloat16")),
        ({"dtype": "bfloat16"}, ("dtype='bfloat16'", "float32", "model.to")),
        ({"block_size": 0}, ("block_size=0",)),
        ({"block_size": 20, "target": "npu"}, ("block_size=20", "multiple of 16")),
        ({"num_blocks": -1}, ("num_blocks=-1",)),
        ({"num_blocks": True}, ("num_blocks=True",)),
        ({"num_blocks": 8, "kv_cache_memory": "1GiB"}, ("num_blocks=8", "kv_cache_memory='1GiB'")),
        ({"kv_cache_memory": "plenty"}, ("kv_cache_memory='plenty'", "GiB")),
        ({"kv_cache_memory": 100}, ("kv_cache_memory=100",)),
        ({"max_num_seqs": 0}, ("max_num_seqs=0",)),
        ({"max_num_batched_tokens": 1.5}, ("max_num_batched_tokens=1.5",)),
        ({"max_model_len": 10_000}, ("max_model_len=10000", "512")),
        ({"max_model_len": 400, "num_blocks": 4, "block_size": 16}, ("max_model_len=400", "64 tokens")),
        ({"verify": "maybe"}, ("verify='maybe'", "every-pass")),
        ({"codegen": "llvm"}, ("codegen='llvm'", "inductor")),
        ({"codegen": "ge"}, ("codegen='ge'", "target='npu'")),
        ({"codegen": "inductor", "target": "npu"}, ("codegen='inductor'", "'ge'")),
        ({"codegen": "aclgraph", "target": "npu"}, ("codegen='aclgraph'", "needs an NPU")),
        ({"static_decode": True}, ("static_decode=True", "codegen='none'", "codegen='ge'")),
        ({"device": "npu"}, ("device='npu'", "target='npu'")),
        ({"passes": {"skip": ["no_such_pass"]}}, ("no_such_pass",)),
        ({"passes": ["recognize_sdpa"]}, ("passes=",)),
        ({"tokenizer": 3}, ("tokenizer", "int")),
    ],
)
def test_bad_option_is_one_line(
    llama: PreTrainedModel,
    options: dict[str, Any],
    words: tuple[str, ...],
    one_line: Callable[[BaseException], str],
) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        pagoda.LLM(llama, **{"verify": "off", "codegen": "none"} | options)
    message = one_line(error.value)
    assert all(word in message for word in words), message


def test_bad_module_is_one_line(llama: PreTrainedModel, one_line: Callable[[BaseException], str]) -> None:
    for model, word in (
        (nn.Linear(2, 2), "Linear"),
        (7, "int"),
        (LlamaModel(llama.config).eval(), "causal LM"),
        (llama.train(), "model.eval()"),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            pagoda.LLM(model)
        assert word in one_line(error.value)


def test_attention_that_no_pass_takes_is_one_line(
    llama: PreTrainedModel, fast: dict[str, Any], one_line: Callable[[BaseException], str]
) -> None:
    with pytest.raises((ValueError, RuntimeError)) as error:
        pagoda.LLM(llama, **fast, passes={"skip": ["recognize_sdpa"]})
    assert "attention" in one_line(error.value)


def test_missing_and_broken_checkpoints_are_one_line(
    checkpoint: Path, tmp_path: Path, one_line: Callable[[BaseException], str]
) -> None:
    def refused(model: Path | str, word: str) -> None:
        with pytest.raises(ValueError) as error:
            pagoda.LLM(model)
        message = one_line(error.value)
        assert "model=" in message and word in message, message

    refused(tmp_path / "nothing", "does not exist")
    refused("", "does not exist")
    refused(tmp_path, "config.json")
    refused(checkpoint / "config.json", "is a file")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(checkpoint, tmp_path / name))

    no_weights = copy("no-weights")
    (no_weights / "model.safetensors").unlink()
    refused(no_weights, "could not load its weights")
    torn = copy("torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:5000])
    refused(torn, "could not load its weights")
    bad_config = copy("bad-config")
    (bad_config / "config.json").write_text("{")
    refused(bad_config, "config")

    deeper = copy("lacking-weights")
    config = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    refused(deeper, "lacks")

    for config_class, word in ((T5Config, "encoder-decoder"),):
        folder = tmp_path / config_class.model_type
        config_class().save_pretrained(folder)
        refused(folder, word)
    vision = tmp_path / "vision"
    vision.mkdir()
    (vision / "config.json").write_text('{"model_type": "vit"}')
    refused(vision, "causal LM")
    quantized = copy("quantized")
    (quantized / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 2, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    refused(quantized, "quantized")


def test_checkpoint_without_tokenizer_takes_ids_only(
    checkpoint: Path, tmp_path: Path, fast: dict[str, Any], one_line: Callable[[BaseException], str]
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "bare"))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    bare = pagoda.LLM(folder, **fast)
    assert bare.tokenizer is None
    assert len(bare.generate([[5, 6]], GREEDY)[0].outputs[0].token_ids) == 8
    with pytest.raises((ValueError, TypeError)) as error:
        bare.generate(["text"], GREEDY)
    assert "tokenizer" in one_line(error.value)
    assert pagoda.LLM(folder, tokenizer=checkpoint, **fast).generate(["the"], GREEDY)[0].outputs[0].text
    with pytest.raises(ValueError, match="tokenizer="):
        pagoda.LLM(folder, tokenizer=folder, **fast)


def test_import_is_light() -> None:
    code = (
        "import sys, torch_pagoda\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'\n"
        "assert set(torch_pagoda.__all__) <= set(dir(torch_pagoda))\n"
        "try:\n    torch_pagoda.nonsense\nexcept AttributeError as e:\n    print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "nonsense" in done.stdout


def test_passes_that_are_chosen_run_beside_the_required_ones(
    reference: PreTrainedModel, llama: PreTrainedModel, fast: dict[str, Any]
) -> None:
    chosen = ["recognize_rms_norm", "fuse_residual_norm"]
    llm = pagoda.LLM(llama, passes={"only": chosen}, **fast)
    ran = {record.name: record.matches for record in llm.compile_report.passes}
    assert ran["insert_paged_cache"] == 2 and all(ran[name] for name in chosen) and "recognize_rope" not in ran
    tokens = llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    assert list(tokens) == greedy_tokens(reference, [5, 6, 7], 8)


def test_threads_are_fitted_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fitted: list[bool] = []
    monkeypatch.setattr("torch_pagoda.llm.limit_threads", lambda: fitted.append(True))
    with pytest.raises((OSError, ValueError)):
        pagoda.LLM(tmp_path / "nothing")
    assert fitted
