"""What a model hands its layers: layers that are given masks of other kinds are not alike, at whatever length."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.capture import layer_arguments as subject
from torch_pagoda.compiler.capture.layer_arguments import CannotRun, layer_arguments
from torch_pagoda.compiler.capture.layer_repeat import LayerRepeat

from tiny_models import build_tiny_model

DEPTH = 12


def mask(tokens, window=None):
    behind = torch.arange(tokens)[:, None] - torch.arange(tokens)
    keep = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return torch.where(keep, 0.0, torch.finfo(torch.float32).min)[None, None]


def one_mask(model, hidden):
    return [mask(hidden.shape[1])] * DEPTH


def a_mask_for_each(model, hidden):
    return [mask(hidden.shape[1], 256) for _ in range(DEPTH)]


def none(model, hidden):
    return [None] * DEPTH


def window_in_the_second_half(model, hidden):
    full, sliding = mask(hidden.shape[1]), mask(hidden.shape[1], 256)
    return [full if n < DEPTH // 2 else sliding for n in range(DEPTH)]


def last_is_global(model, hidden):
    return [mask(hidden.shape[1], None if n == DEPTH - 1 else 256) for n in range(DEPTH)]


def no_mask_in_the_second_half(model, hidden):
    full = mask(hidden.shape[1])
    return [full if n < DEPTH // 2 else None for n in range(DEPTH)]


def cut_in_place_for_the_last(model, hidden):
    """The mask of all layers is written into, through a view, before the last one."""
    full = mask(hidden.shape[1])
    for n in range(DEPTH):
        if n == DEPTH - 1:
            full[..., 250:, :].clamp_(-1, 0)
        yield full


def written_in_place(model, hidden):
    """By the name of an argument."""
    full = mask(hidden.shape[1])
    for n in range(DEPTH):
        if n == DEPTH - 1:
            torch.mul(full, torch.tensor(1.0), out=full)
        yield full


def from_lists(model, hidden):
    """As long as the prompt, so that their numbers say nothing."""
    return [torch.tensor([[[[0.0] * hidden.shape[1]]]]) for _ in range(DEPTH)]


def numbers(model, hidden):
    return [torch.tensor(1.0 if n < DEPTH // 2 else 2.0) * mask(hidden.shape[1]) for n in range(DEPTH)]


def by_a_table(model, hidden):
    return [mask(hidden.shape[1], model.windows[n]) for n in range(DEPTH)]


class Model(LlamaModel):
    def forward(self, input_ids=None, position_ids=None, use_cache=None, **kwargs):
        hidden = self.embed_tokens(input_ids)
        rope = self.rotary_emb(hidden, position_ids)
        for layer, given in zip(self.layers, self.masks(self, hidden), strict=False):
            hidden = self.step(layer, hidden, {"attention_mask": given, "position_embeddings": rope})
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def plain(layer, hidden, given):
    return layer(hidden, **given)


def tuples(layer, hidden, given):
    return layer(hidden, **given)[0]


def scaled(layer, hidden, given):
    return 0.5 * layer(hidden * 2, **given)


def model_of(masks, step=plain, **settings):
    model = build_tiny_model("llama", num_hidden_layers=DEPTH, **settings).eval()
    model.model.__class__ = Model
    model.model.masks, model.model.step = masks, step
    model.model.register_buffer("windows", torch.full((DEPTH,), 256))
    return model


def alike(model):
    """For each layer the first that is handed the same."""
    found = layer_arguments(model, "model.layers", model.model.layers)
    return [found.index(x) for x in found]


@pytest.fixture(params=[40, 2048], ids=["numbers", "no numbers"])
def tokens(request, monkeypatch):
    monkeypatch.setattr(subject, "trace_length", lambda model: request.param)


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize("masks", [one_mask, a_mask_for_each, none], ids=lambda f: f.__name__)
def test_layers_that_are_handed_the_same(masks):
    model = model_of(masks)
    assert alike(model) == [0] * DEPTH
    repeat = LayerRepeat.of(model)
    assert repeat is not None and repeat.kept == 4


DIFFERENT = {
    window_in_the_second_half: [0] * 6 + [6] * 6,
    last_is_global: [0] * 11 + [11],
    no_mask_in_the_second_half: [0] * 6 + [6] * 6,
    cut_in_place_for_the_last: [0] * 11 + [11],
    written_in_place: [0] * 11 + [11],
    from_lists: list(range(DEPTH)),
    numbers: [0] * 6 + [6] * 6,
    by_a_table: list(range(DEPTH)),
}


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize("masks", DIFFERENT, ids=lambda f: f.__name__)
def test_layers_that_are_handed_other_masks(masks):
    model = model_of(masks)
    assert alike(model) == DIFFERENT[masks]
    assert LayerRepeat.of(model) is None


@pytest.mark.parametrize(
    ("step", "expected"),
    [(plain, [0] * DEPTH), (tuples, [0] * DEPTH), (scaled, [0] + [1] * 11)],
    ids=["tensor", "tuple", "scaled between"],
)
def test_what_is_done_with_the_results_of_layers(step, expected):
    assert alike(model_of(one_mask, step)) == expected


def parts(layer, hidden, given):
    return layer.mlp(hidden)


def by_name(layer, hidden, given):
    return layer(hidden, **given)["hidden_states"]


def twice(layer, hidden, given):
    return layer(layer(hidden, **given), **given)


@pytest.mark.parametrize(
    ("step", "reason"),
    [(parts, "calls 0 of 12 layers"), (by_name, "IndexError"), (twice, "layer 0 is called behind 1 layers")],
    ids=["parts", "by name", "twice"],
)
def test_models_that_do_not_run_without_their_layers_are_compiled_whole(step, reason):
    model = model_of(one_mask, step)
    with pytest.raises(CannotRun, match=reason):
        alike(model)
    assert LayerRepeat.of(model) is None


def kept_in_the_model(model, hidden):
    model.kept = mask(hidden.shape[1])
    model.all_kept["mask"] = model.kept
    return [model.kept] * DEPTH


def test_nothing_without_numbers_stays_in_the_model(monkeypatch):
    monkeypatch.setattr(subject, "trace_length", lambda model: 2048)
    model = model_of(kept_in_the_model)
    model.model.all_kept = {}
    before = [set(vars(module)) for module in model.modules()]
    assert alike(model) == [0] * DEPTH
    assert [set(vars(module)) for module in model.modules()] == before
    assert not model.model.all_kept


def test_a_forward_of_the_layers_own_is_put_back():
    model = model_of(one_mask)
    first = model.model.layers[0]
    own = first.forward = functools.partial(type(first).forward, first)
    assert alike(model) == [0] * DEPTH
    assert first.forward is own and "forward" not in vars(model.model.layers[1])


def test_windows_by_the_layers_index_are_served():
    model = model_of(window_in_the_second_half, sliding_window=256, max_position_embeddings=1024)
    program = build_program(model, CompileOptions(codegen="none", target="cpu"))
    assert program.report.layers_compiled is None and program.report.verdict.ok
    assert [spec.sliding_window for spec in program.caches] == [0] * 6 + [256] * 6


def test_one_mask_for_all_layers_compiles_four():
    program = build_program(model_of(one_mask), CompileOptions(codegen="none", target="cpu"))
    assert program.report.layers_compiled == 4 and program.report.verdict.ok
