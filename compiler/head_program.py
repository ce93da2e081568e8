"""Compiles a head that drafts, over the embeddings and the output matrix of the model that it belongs to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from ..passes import UnsupportedModel
from .build import build_unpacked, finish
from .link.linker import LinkedProgram
from .options import CompileOptions
from .report import CompileReport


def build_head(
    head: nn.Module, model: LinkedProgram, shared: Mapping[str, str], options: CompileOptions
) -> LinkedProgram:
    """Compile a head as ``build_program`` compiles a model: traced, rewritten, compared with the module.

    Args:
        head: takes ``previous_hidden``, see ``capture.model_facts.takes_hidden``; only the program uses it.
        model: the program of the model, with its weights packed.
        shared: qualified name of a weight of ``head`` → that of the model's weight that it is.
        options: those of the model.

    Raises:
        UnsupportedModel: as ``build_program``; or it computes something else over the model's tensors.
    """
    options = replace(options, taps_hidden=True).for_device("cpu")
    report = CompileReport(type(head).__name__)
    built = build_unpacked(head, options, owns_weights=True, report=report)
    names = {_input_of(own): _input_of(name) for own, name in shared.items()}
    built.program.share_inputs(model, names)
    finish(built, owns_weights=True)
    if built.reference is not None:
        verdict = built.check(weight_bits=built.program.weight_bits)
        if not verdict.ok:
            raise UnsupportedModel(f"{report.model} over the model's own embeddings and head: {verdict.reason}")
        report.verdict = verdict
    return built.program


def _input_of(weight: str) -> str:
    """The graph input that Dynamo makes of a parameter with this qualified name."""
    *modules, name = weight.split(".")
    return re.sub(r"\W", "_", f"l_model_{''.join(f'modules_{module}_' for module in modules)}parameters_{name}_")
