"""gpt-oss with experts in MXFP4: as a checkpoint that is served as it is, and as the file that llama.cpp reads."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf.quants import dequantize
from stored_matrices import mxfp4_blocks
from write_gguf import convert
from write_mxfp4 import write_mxfp4

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight

from tiny_models import build_tiny_model

EXPERTS = "model.layers.1.mlp.experts."


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The model, and the folder of its checkpoint."""
    model = build_tiny_model("gpt_oss", hidden_size=64, intermediate_size=96, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".experts." in name:
                tensor.normal_()
    folder = tmp_path_factory.mktemp("gpt-oss") / "mxfp4"
    write_mxfp4(model, folder)
    return model, folder


def means(model, name):
    """The numbers ``[experts, out, in]`` that the blocks of a weight mean, by the tests' own rounding."""
    return mxfp4_blocks(model.get_parameter(EXPERTS + name))[1].mT


def test_the_checkpoint_is_served_as_it_is(written):
    model, folder = written
    loaded = load_model(str(folder), torch.bfloat16, trust_remote_code=False, device=torch.device("cpu"))
    for name in ("gate_up_proj", "down_proj"):
        weight = loaded.get_parameter(EXPERTS + name)
        assert isinstance(weight, StoredWeight) and weight.form.code == "e2m1"
        assert torch.equal(weight.dense().float().mT, means(model, name))
    kept = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(loaded.get_parameter(kept), model.get_parameter(kept))


def test_llama_cpp_reads_the_same_numbers(written, tmp_path):
    model, folder = written
    convert(folder, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    both = means(model, "gate_up_proj")
    bias = model.get_parameter(f"{EXPERTS}gate_up_proj_bias").float()
    expected = {
        "ffn_gate_exps.weight": both[:, ::2],
        "ffn_up_exps.weight": both[:, 1::2],
        "ffn_down_exps.weight": means(model, "down_proj"),
        "ffn_gate_exps.bias": bias[:, ::2],
        "ffn_up_exps.bias": bias[:, 1::2],
        "ffn_down_exps.bias": model.get_parameter(f"{EXPERTS}down_proj_bias").float(),
        "attn_q.weight": model.get_parameter("model.layers.1.self_attn.q_proj.weight").float(),
        "attn_sinks.weight": model.get_parameter("model.layers.1.self_attn.sinks").float(),
    }
    for name, numbers in expected.items():
        tensor = found[f"blk.1.{name}"]
        read = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(read.view(numbers.shape), numbers.detach()), name
    kinds = {name: found[f"blk.1.{name}"].tensor_type for name in ("ffn_up_exps.weight", "attn_q.weight")}
    assert [kind.name for kind in kinds.values()] == ["MXFP4", "BF16"]


def test_a_model_without_experts_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has none of .*; give a model of gpt-oss"):
        write_mxfp4(build_tiny_model("llama"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
