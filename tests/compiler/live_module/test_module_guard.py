"""Public functions of torch, transformers, accelerate and PEFT on a live module that is served: those that change no
logits are accepted, the others refused."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.modules import module as all_modules
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import AutoTokenizer, GenerationConfig, Trainer, TrainingArguments, pipeline
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama

from torch_pagoda.compiler import ModuleGuard, WeightGuard
from torch_pagoda.compiler.live_module import module_guard
from torch_pagoda.compiler.live_module.code_reads import computes_names
from torch_pagoda.compiler.live_module.forward_reads import ForwardReads

from tiny_models import build_tiny_model

accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

IDS = torch.tensor([[5, 9, 17]])
SHIPPED = "examples/tiny-pydoc"
LORA = {"target_modules": ["q_proj"]}


def loss(model):
    model(IDS, labels=IDS).loss.backward()


def with_hook(model, module, **terms):
    module.register_forward_hook(lambda *given, **more: None, **terms).remove()
    module.register_forward_pre_hook(lambda *given, **more: None).remove()


def setting(name, value):
    return lambda model, tmp_path: setattr(model.config, name, value)


def trained(model, tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    Trainer(model, arguments, eval_dataset=[{"input_ids": IDS[0], "labels": IDS[0]}]).evaluate()


def exported(model, tmp_path):
    torch.export.export(model, (IDS,), kwargs={"use_cache": False})


def hidden_states(model, tmp_path):
    assert model(IDS, output_hidden_states=True).hidden_states


def modes(model, tmp_path):
    model.train()
    model.eval()


def attention_and_back(model, tmp_path):
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    model.set_attn_implementation(before)


def checkpointing(model, tmp_path):
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    model.enable_input_require_grads()


def hooks_of_training(model, tmp_path):
    model.register_full_backward_hook(lambda *given: None)
    model.register_state_dict_post_hook(lambda *given: None)
    model.register_load_state_dict_post_hook(lambda *given: None)
    model.lm_head.weight.register_hook(lambda gradient: gradient)


def global_hook(model, tmp_path):
    all_modules.register_module_forward_hook(lambda *given: None).remove()


def hook_of_accelerate(model, tmp_path):
    accelerate.hooks.add_hook_to_module(model, accelerate.hooks.ModelHook())
    accelerate.hooks.remove_hook_from_module(model)


def without_adapter(model, tmp_path):
    peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **LORA)).unload()


def soft_prompt(model, tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(model, config).eval()(IDS)


def bit_by_bit(model, tmp_path):
    peft.prepare_model_for_kbit_training(model)


def copies(model, tmp_path):
    copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    torch.save(model, io.BytesIO())


def clipped(model, tmp_path):
    loss(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    nn.utils.parameters_to_vector(model.parameters())
    model.zero_grad()


def same_parts(model, tmp_path):
    model.set_input_embeddings(model.get_input_embeddings())
    model.set_submodule("lm_head", model.lm_head)
    model.resize_token_embeddings(model.config.vocab_size)
    model.tie_weights()
    model.forward = model.forward


def notes(model, tmp_path):
    model.my_note = model.config.my_note = {"of": "the user"}
    model.my_note["of"] = "another"
    model.add_model_tags("tag")
    model.warnings_issued = {"estimate_tokens": True}


def static_cache(model, tmp_path):
    model.generate(IDS, max_new_tokens=2, do_sample=False, cache_implementation="static")


def counted(model, tmp_path):
    with torch.profiler.profile(with_modules=True), torch.utils.flop_counter.FlopCounterMode(display=False):
        model(IDS)


WITHOUT_EFFECT = {
    "torch.compile": lambda model, tmp_path: torch.compile(model),
    "torch.compile, called": lambda model, tmp_path: torch.compile(model, backend="eager")(IDS),
    "Module.compile": lambda model, tmp_path: model.compile(backend="eager"),
    "Module.compile of layers": lambda model, tmp_path: [layer.compile() for layer in model.model.layers],
    "torch.export": exported,
    "functional_call": lambda model, tmp_path: torch.func.functional_call(
        model, {name: x.clone() for name, x in model.named_parameters()}, (IDS,)
    ),
    "train, eval": modes,
    "requires_grad_": lambda model, tmp_path: model.requires_grad_(False),
    "backward": lambda model, tmp_path: loss(model),
    "clip_grad_norm_": clipped,
    "hooks of training": hooks_of_training,
    "hooks, removed": lambda model, tmp_path: with_hook(model, model.model.layers[0], with_kwargs=True),
    "global hook, removed": global_hook,
    "state_dict": lambda model, tmp_path: model.load_state_dict(model.state_dict()),
    "to": lambda model, tmp_path: model.to("cpu").float().apply(lambda module: None),
    "copies": copies,
    "DataParallel": lambda model, tmp_path: nn.DataParallel(model),
    "AveragedModel": lambda model, tmp_path: torch.optim.swa_utils.AveragedModel(model),
    "profile": counted,
    "forward": lambda model, tmp_path: (model(IDS), model(IDS, use_cache=False)),
    "output_hidden_states": hidden_states,
    "generate": lambda model, tmp_path: model.generate(IDS, max_new_tokens=2, num_beams=2),
    "generate, static cache": static_cache,
    "generation_config": lambda model, tmp_path: setattr(model, "generation_config", GenerationConfig(top_k=3)),
    "save_pretrained": lambda model, tmp_path: model.save_pretrained(tmp_path),
    "set_attn_implementation": attention_and_back,
    "gradient checkpointing": checkpointing,
    "pipeline": lambda model, tmp_path: pipeline(
        "text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(SHIPPED)
    ),
    "Trainer": trained,
    "parts set to what they are": same_parts,
    "notes": notes,
    "pad_token_id": setting("pad_token_id", 3),
    "use_cache": setting("use_cache", False),
    "id2label": setting("id2label", {0: "yes"}),
    "accelerate.dispatch_model": lambda model, tmp_path: accelerate.dispatch_model(model, {"": "cpu"}),
    "Accelerator.prepare": lambda model, tmp_path: accelerate.Accelerator(cpu=True).prepare(model),
    "accelerate's hook, removed": hook_of_accelerate,
    "PEFT, unloaded": without_adapter,
    "PEFT, prompt": soft_prompt,
    "PEFT, kbit": bit_by_bit,
}


def hook_in_accelerate(model, tmp_path):
    accelerate.hooks.add_hook_to_module(model.model.norm, accelerate.hooks.ModelHook())


def compiled_forward(model, tmp_path):
    model.forward = torch.compile(model.forward)


def other_class(model, tmp_path):
    model.model.norm.__class__ = nn.LayerNorm


def scaled(model, tmp_path):
    model.model.layers[0].self_attn.scaling *= 2


WITH_EFFECT = {
    "half": lambda model, tmp_path: model.half(),
    "load_state_dict, assign": lambda model, tmp_path: model.load_state_dict(
        {name: x.clone() for name, x in model.state_dict().items()}, assign=True
    ),
    "weight_norm": lambda model, tmp_path: parametrizations.weight_norm(model.lm_head),
    "orthogonal": lambda model, tmp_path: parametrize.register_parametrization(
        model.model.layers[0].mlp.up_proj, "weight", nn.Softplus()
    ),
    "prune": lambda model, tmp_path: prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.5),
    "resize_token_embeddings": lambda model, tmp_path: model.resize_token_embeddings(model.config.vocab_size + 8),
    "set_attn_implementation": lambda model, tmp_path: model.set_attn_implementation("eager"),
    "train": lambda model, tmp_path: model.train(),
    "num_hidden_layers": setting("num_hidden_layers", 1),
    "rms_norm_eps": setting("rms_norm_eps", 0.5),
    "hook": lambda model, tmp_path: model.model.norm.register_forward_hook(lambda *given: None),
    "Module.forward": compiled_forward,
    "class": other_class,
    "scaling": scaled,
    "is_causal": lambda model, tmp_path: setattr(model.model.layers[1].self_attn, "is_causal", False),
    "accelerate's hook": hook_in_accelerate,
    "accelerate.cpu_offload": lambda model, tmp_path: accelerate.cpu_offload(model),
    "add_adapter": lambda model, tmp_path: model.add_adapter(peft.LoraConfig(**LORA)),
    "inject_adapter": lambda model, tmp_path: peft.inject_adapter_in_model(peft.LoraConfig(**LORA), model),
}


class Guards:
    """What ``LLM`` checks of a live module."""

    def __init__(self, model):
        self.guards = WeightGuard(model).check, lambda: ModuleGuard.check(module, fully=True)
        module = ModuleGuard(model)

    def check(self):
        for check in self.guards:
            check()
            check()


@pytest.fixture
def model():
    return build_tiny_model("llama", num_hidden_layers=2)


@pytest.mark.parametrize("call", WITHOUT_EFFECT.values(), ids=WITHOUT_EFFECT)
def test_what_changes_no_logits_is_accepted(model, tmp_path, call):
    guards = Guards(model)
    call(model, tmp_path)
    guards.check()
    model.model.norm.variance_epsilon = 0.5
    with pytest.raises(RuntimeError, match=r"model\.norm\.variance_epsilon"):
        guards.check()


@pytest.mark.parametrize("call", WITH_EFFECT.values(), ids=WITH_EFFECT)
def test_what_changes_logits_is_refused(model, tmp_path, call):
    guards = Guards(model)
    call(model, tmp_path)
    with pytest.raises(RuntimeError, match="recompile it"):
        guards.check()


def test_a_guard_that_looks_at_every_attribute_is_found_out(model, tmp_path, monkeypatch):
    monkeypatch.setattr(ForwardReads, "reads", lambda self, name: True)
    guards = Guards(model)
    notes(model, tmp_path)
    with pytest.raises(RuntimeError, match="'my_note'"):
        guards.check()


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "mixtral", "qwen3_5_text"])
def test_torch_compile_and_a_padding_token_change_no_family(family):
    model = build_tiny_model(family)
    guards = Guards(model)
    torch.compile(model)
    model.config.pad_token_id = model.config.eos_token_id
    model(IDS, output_hidden_states=True)
    guards.check()


def test_names_that_transformers_puts_together_are_read():
    model = build_tiny_model("gemma3_text")
    guards = Guards(model)
    model.model.rotary_emb.full_attention_attention_scaling = 2.0
    with pytest.raises(RuntimeError, match="full_attention_attention_scaling"):
        guards.check()


def test_a_module_whose_code_computes_names_has_every_attribute_read():
    class Scaled(nn.Module):
        mode, strong = "weak", 2.0
        weak = 1.0

        def forward(self, x):
            return x * getattr(self, self.mode)

    module = Scaled()
    guards = Guards(module)
    module.weak = 3.0
    with pytest.raises(RuntimeError, match="weak"):
        guards.check()


def test_functions_that_forward_calls_may_not_be_replaced(model, monkeypatch):
    for place, name in ((modeling_llama, "rotate_half"), (torch.nn.functional, "silu"), (SiLUActivation, "forward")):
        guards = Guards(model)
        with monkeypatch.context() as patched:
            patched.setattr(place, name, lambda *given: given[-1])
            with pytest.raises(RuntimeError, match=name):
                guards.check()
        guards.check()


def test_what_counts_of_dtypes():
    assert module_guard._same("float32", torch.float32)
    assert not module_guard._same("float16", torch.float32)


@pytest.mark.parametrize(
    ("source", "computed"),
    [
        ("getattr(x.config, 'name')", False),
        ("getattr(x.f(1)(2), 'name', getattr(x, 'other', []))", False),
        ("hasattr(x, 'name') and x.name", False),
        ("getattr(x, x.mode)", True),
        ("getattr(x, f'layer_{x.n}', None)", True),
        ("getattr(x, 'a' + x.mode)", True),
        ("getattr(x.f('name'), x.mode)", True),
        ("[getattr(x, k) for k in ('a', 'b')]", True),
        ("vars(x)['name']", True),
        ("x.__dict__", True),
        ("list(map(getattr, [x], ['name']))", True),
    ],
)
def test_computed_names_are_told(source, computed):
    code = compile(f"def read(x):\n    return {source}", "", "exec")
    space = {}
    exec(code, space)
    assert computes_names(space["read"].__code__) == computed
