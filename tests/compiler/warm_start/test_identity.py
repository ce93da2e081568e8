"""Identities: the same model has the same one in every process, and nothing that a program depends on is left out."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention
from transformers.models.llama import modeling_llama

from torch_pagoda.compiler import CompileOptions, options
from torch_pagoda.compiler.live_module.describer import CannotIdentify
from torch_pagoda.compiler.warm_start import identity as module
from torch_pagoda.compiler.warm_start.framework_state import class_state, module_state
from torch_pagoda.compiler.warm_start.identity import identity
from torch_pagoda.compiler.weights.tensor_contents import WHOLE_BYTES, contents_digest
from torch_pagoda.passes import PASSES

from tiny_models import build_tiny_model


def of(model, options=CompileOptions()):  # noqa: B008
    """The digest of a model; for one that is not stored a text that no other has."""
    try:
        return identity(model, options, contents_digest(model)).digest
    except CannotIdentify as error:
        return f"{next(_refusals)}: {error}"


_refusals = itertools.count()


@pytest.fixture
def llama():
    return build_tiny_model("llama", num_hidden_layers=2)


def test_equal_models_are_one(llama):
    assert of(llama) == of(build_tiny_model("llama", num_hidden_layers=2))


def test_other_processes_agree():
    """Hashes of strings and addresses of objects differ between them, and what else was imported."""
    kinds = ("llama", "gemma3_text", "gpt2", "mixtral")
    code = (
        "from tiny_models import build_tiny_model\n"
        "from torch_pagoda.compiler import CompileOptions\n"
        "from torch_pagoda.compiler.warm_start.identity import identity\n"
        "from torch_pagoda.compiler.weights.tensor_contents import contents_digest\n"
        f"for kind in {kinds}:\n"
        "    model = build_tiny_model(kind)\n"
        "    print(identity(model, CompileOptions(), contents_digest(model)).digest)\n"
    )
    tests = str(Path(__file__).parents[2] / "support")
    env = {"PYTHONPATH": tests, "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    found = []
    for seed, imports in (("1", ""), ("2", "import peft, accelerate, openai\n")):
        command = [sys.executable, "-c", imports + code]
        run = subprocess.run(command, env=env | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        found.append(run.stdout.split())
    assert found[0] == found[1] and len(set(found[0])) == 4


def scale(model):
    model.model.layers[1].self_attn.scaling *= 2


def hook(model):
    model.model.layers[0].register_forward_hook(lambda m, args, output: output)


def method(model):
    layer = model.model.layers[0].mlp
    layer.forward = types.MethodType(lambda self, x: self.down_proj(x), layer)


def small_weight(model):
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3


def buffer(model):
    model.model.rotary_emb.inv_freq[1] *= 1.5


def buffer_of_the_same_bytes(model):
    frequencies = model.model.rotary_emb.inv_freq
    model.model.rotary_emb.inv_freq = frequencies.view(torch.int32)


def tensor_attribute(model):
    model.model.layers[0].table = torch.arange(3)


def one_frozen(model):
    model.lm_head.weight.requires_grad_(False)


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def swapped_layers(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def other_class(model):
    class Norm(modeling_llama.LlamaRMSNorm):
        pass

    model.model.norm.__class__ = Norm


def config(model):
    model.config.sliding_window = 7


CHANGES = (
    scale,
    hook,
    method,
    small_weight,
    buffer,
    buffer_of_the_same_bytes,
    tensor_attribute,
    one_frozen,
    tied,
    swapped_layers,
    other_class,
    config,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_changed_module_has_another(llama, change):
    before = of(llama)
    change(llama)
    assert of(llama) != before


def test_weights_that_lie_in_one_storage_have_another(llama):
    """Linking would leave them where they are."""
    before = of(llama)
    attention = llama.model.layers[0].self_attn
    whole = torch.cat([attention.k_proj.weight.data, attention.v_proj.weight.data])
    attention.k_proj.weight.data, attention.v_proj.weight.data = whole.chunk(2)
    assert of(llama) != before


def named_alike(function):
    """Another function that says that it is the same one."""
    return functools.wraps(function)(lambda *given, **more: function(*given, **more))


def rotary(patch):
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", named_alike(modeling_llama.apply_rotary_pos_emb))


def class_of_the_same_name(patch):
    place = {"__module__": modeling_llama.__name__, "__qualname__": "LlamaRMSNorm"}
    patch.setattr(modeling_llama, "LlamaRMSNorm", type("LlamaRMSNorm", (nn.Module,), place))


PATCHES = {
    "a function": rotary,
    "a method": lambda m: m.setattr(modeling_llama.LlamaMLP, "forward", named_alike(modeling_llama.LlamaMLP.forward)),
    "code in its place": lambda m: m.setattr(modeling_llama.rotate_half, "__code__", (lambda x: -x).__code__),
    "a default": lambda m: m.setattr(modeling_llama.apply_rotary_pos_emb, "__defaults__", (2,)),
    "a property": lambda m: m.setattr(
        modeling_llama.LlamaRMSNorm, "variance_epsilon", property(lambda self: 0.5), raising=False
    ),
    "a number of a class": lambda m: m.setattr(modeling_llama.LlamaAttention, "is_causal", False, raising=False),
    "a class of the same name": class_of_the_same_name,
    "code of torch's in its place": lambda m: m.setattr(nn.functional.silu, "__code__", nn.functional.relu6.__code__),
    "the attention": lambda m: m.setitem(
        AttentionInterface._global_mapping, "sdpa", AttentionInterface._global_mapping["flash_attention_2"]
    ),
    "what the attention calls": lambda m: m.setattr(
        sdpa_attention, "repeat_kv", named_alike(sdpa_attention.repeat_kv)
    ),
}


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_a_model_with_other_code_is_another(llama, monkeypatch, patch):
    before = of(llama)
    with monkeypatch.context() as patched:
        patch(patched)
        assert of(llama) != before
    assert of(llama) == before


def test_functions_that_differ_in_what_they_close_over_have_others(llama):
    def times(factor):
        return lambda x: x * factor

    prints = set()
    for factor in (1.0, 2.0):
        llama.model.layers[0].mlp.gain = times(factor)
        prints.add(of(llama))
    assert len(prints) == 2


def test_hooks_of_all_modules_are_part_of_it(llama):
    before = of(llama)
    with nn.modules.module.register_module_forward_hook(lambda m, args, output: output):
        assert of(llama) != before


def test_attention_that_users_register_is_part_of_it(llama, monkeypatch):
    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping))
    prints = set()
    for factor in (1, 2):

        def attention(*args, factor=factor, **kwargs):
            raise NotImplementedError(factor)

        AttentionInterface.register("mine_of_a_test", attention)
        llama.config._attn_implementation = "mine_of_a_test"
        prints.add(of(llama))
    assert len(prints) == 2


@pytest.mark.parametrize(
    "options",
    [
        CompileOptions(opt_level=1),
        CompileOptions(verify="off"),
        CompileOptions(pack_weights=True),
        CompileOptions(kv_cache_dtype="int8"),
        CompileOptions(quantization="int8"),
        CompileOptions(quantization="int8", group_size=64),
        CompileOptions(passes={"skip": ["group_rope"]}),
    ],
    ids=str,
)
def test_other_options_have_another(llama, options):
    assert of(llama, options) != of(llama)


@pytest.mark.parametrize("part", range(len(module.environment())))
def test_versions_processor_and_sources_are_part_of_it(llama, monkeypatch, part):
    before = of(llama)
    now = module.environment()
    monkeypatch.setattr(module, "environment", lambda: (*now[:part], "another", *now[part + 1 :]))
    assert of(llama) != before


def test_sources_are_read_in_full(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1")
    monkeypatch.setattr(module, "_OURS", (tmp_path,))
    found = set()
    for text in ("x = 1", "x = 2"):
        (tmp_path / "a.py").write_text(text)
        found.add(module.environment.__wrapped__())
    assert len(found) == 2


def test_passes_are_part_of_it(llama, monkeypatch):
    before = of(llama)
    monkeypatch.setattr(options, "PASSES", PASSES[:-1])
    assert of(llama, CompileOptions(pack_weights=True)) != before
    assert of(llama) == before  # the last one packs weights, which nobody asked for


def test_default_dtype_is_part_of_it(llama):
    before = of(llama)
    torch.set_default_dtype(torch.float64)
    try:
        assert of(llama) != before
    finally:
        torch.set_default_dtype(torch.float32)


def test_large_parameters_are_sampled_from_the_first_to_the_last_element():
    layer = nn.Linear(512, WHOLE_BYTES // 512, bias=False)
    before = contents_digest(layer)
    for row, column in ((0, 0), (-1, -1)):
        with torch.no_grad():
            layer.weight[row, column] += 1
        after = contents_digest(layer)
        assert after != before
        before = after


def test_which_other_models_are_loaded_does_not_count(llama):
    before = of(llama)
    for kind in ("mixtral", "gemma3_text", "qwen3_5_text"):
        assert of(build_tiny_model(kind)) != before
    assert of(llama) == before


def test_generation_config_is_no_part_of_it(llama):
    before = of(llama)
    llama.generation_config.temperature = 0.3
    assert of(llama) == before


def test_objects_without_content_are_refused(llama):
    llama.model.source = iter([1, 2])
    with pytest.raises(CannotIdentify, match="list_iterator"):
        identity(llama, CompileOptions(), "")


def test_tensors_elsewhere_are_refused(llama):
    llama.model.norm.to("meta")
    with pytest.raises(CannotIdentify, match=r"model\.norm\.weight is a .* on meta"):
        identity(llama, CompileOptions(), "")


class Own:
    """A stand-in for a class of the framework, with members from its files."""

    forward = nn.Linear.forward
    linear = torch.nn.functional.linear
    relu = nn.ReLU.forward


MEMBERS = {
    "another function": nn.ReLU.forward,
    "a function in C": torch.relu,
    "a property": property(nn.ReLU.forward),
    "a classmethod": classmethod(nn.ReLU.forward),
    "a number": 3,
    "nothing": None,
}


@pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS)
def test_a_class_counts_by_its_members(monkeypatch, member):
    before = class_state(Own)
    monkeypatch.setattr(Own, "forward", member)
    assert class_state(Own) != before


def test_of_methods_those_count_that_are_read(monkeypatch):
    before = class_state(Own, lambda name: name == "relu")
    monkeypatch.setattr(Own, "forward", nn.ReLU.forward)
    assert class_state(Own, lambda name: name == "relu") == before
    monkeypatch.setattr(Own, "relu", nn.Linear.forward)
    assert class_state(Own, lambda name: name == "relu") != before


@pytest.mark.parametrize("wrap", [lambda f: f, property, staticmethod], ids=["method", "property", "static"])
def test_a_class_with_a_function_from_elsewhere_is_refused(monkeypatch, wrap):
    monkeypatch.setattr(Own, "forward", wrap(of))
    with pytest.raises(CannotIdentify, match=r"\.of stands in a module of the framework"):
        class_state(Own)


def test_a_module_counts_by_what_it_names():
    made = types.ModuleType("torch.nn.made")
    made.__dict__.update(number=1, _private=2)
    first = module_state(made)
    made.__doc__ = "does not count"
    assert module_state(made) == first
    for name, value in (("number", 2), ("_private", 3), ("other", 1)):
        before = module_state(made)
        setattr(made, name, value)
        assert module_state(made) != before, name
