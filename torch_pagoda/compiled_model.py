"""Models to serve: loaded or live, compiled now or restored from an earlier start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .checkpoint.configs import causal_lm_class, check_tokenizer, load_config, load_tokenizer
from .checkpoint.gguf.container import is_gguf
from .checkpoint.gguf.source import gguf_in
from .checkpoint.loading import check_module, checkpoint_files, load_model, resolve_dtype, stored_in
from .checkpoint.quantized import quantization_method
from .checkpoint.source import check_source
from .compiler import (
    CheckpointFiles,
    CompileOptions,
    ModuleGuard,
    NotFinite,
    UnsupportedModel,
    WeightGuard,
    compile_program,
    program_of_checkpoint,
)
from .compiler.calibrate.recorded_grid import on_recorded_grid
from .compiler.capture.state_layers import check_state
from .compiler.compile import all_layers_needed
from .default_params import recommended_params
from .options import LoadOptions
from .runtime.autocast import without_autocast
from .shipping import ShippingRanks, other_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .checkpoint.layers_in_files import LayersInFiles
    from .compiler.warm_start.shipment import AnyProgram


@dataclass(frozen=True)
class CompiledModel:
    """A model that can be served.

    Attributes:
        program: the compiled model.
        tokenizer: its tokenizer, or None.
        eos_token_ids: tokens that end a sequence.
        recommended_params: sampling parameters of the generation config, by their names in ``SamplingParams``.
        weights: detects whether a weight was replaced, moved or written to.
        guard: detects other changes of a live module; None for a loaded model.
    """

    program: AnyProgram
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: list[int]
    recommended_params: dict[str, Any]
    weights: WeightGuard
    guard: ModuleGuard | None


def compiled_model(
    model: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None,
    loading: LoadOptions,
    compiling: CompileOptions,
    device: torch.device,
    known_modules: frozenset[str],
) -> CompiledModel:
    """Load a model, unless it is a live module, and its tokenizer; compile it, unless an earlier start did.

    Args:
        model, tokenizer: as for ``LLM``.
        loading: how to load it.
        compiling: how to compile it.
        device: the device that ``loading`` selects.
        known_modules: names of the modules that were imported before.

    Raises:
        TypeError, ValueError: as ``LLM``.
    """
    others = other_ranks(model, loading, compiling, device)
    if others is not None:
        device = torch.device("cpu")  # a device need not hold more than one rank's part
    try:
        return _compiled(model, tokenizer, loading, compiling, device, known_modules, others)
    except BaseException:
        if others is not None:
            others.close()
        raise


def _compiled(
    model: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None,
    loading: LoadOptions,
    compiling: CompileOptions,
    device: torch.device,
    known_modules: frozenset[str],
    others: ShippingRanks | None,
) -> CompiledModel:
    loads = isinstance(model, str | os.PathLike)
    if loading.gguf_file is not None:
        if not isinstance(model, str | os.PathLike):
            raise ValueError(f"gguf_file={loading.gguf_file!r} names a file; pass its folder")
        model = gguf_in(model, loading.gguf_file)

    program, files, found, layers = None, None, None, None
    if isinstance(model, str | os.PathLike):
        files = checkpoint_files(model, loading.dtype) if device.type == "cpu" else None
        with without_autocast(device.type):
            if files is not None and compiling.target == "cpu":
                found = program_of_checkpoint(files, compiling, others)
        if found is not None:
            program, module = found
        else:
            _, config = load_config(model, loading.trust_remote_code)
            compiling = on_recorded_grid(compiling, config)
            if (model_class := causal_lm_class(config)) is not None:
                with _refusals_named(model):
                    check_state(model_class, config)
            if others is not None:
                layers = _layers_to_leave(model, config, loading, compiling, files, others)
            module = load_model(model, loading.dtype, loading.trust_remote_code, device, config, layers)
    else:
        module = check_module(model, loading.dtype, device)
        compiling = on_recorded_grid(compiling, module.config)
    if tokenizer is None and isinstance(model, str | os.PathLike):
        tokenizer = load_tokenizer(model, loading.trust_remote_code, required=False)
    elif isinstance(tokenizer, str | os.PathLike):
        tokenizer = load_tokenizer(tokenizer, loading.trust_remote_code, required=True)
    else:
        tokenizer = check_tokenizer(tokenizer)
    recommended = recommended_params(loading.generation_config, module)

    if program is None:
        with _refusals_named(model), without_autocast(device.type):
            program = compile_program(
                module,
                compiling,
                owns_weights=loads,
                files=files,
                loaded=known_modules,
                others=others,
                layers=layers,
            )
    if found is None and others is None:
        weights = WeightGuard(module, program.copied_weights, program.merged_weights)
    else:  # nobody but the program holds the tensors
        weights = WeightGuard(nn.Module())
    guard = None if loads else ModuleGuard(module)
    return CompiledModel(program, tokenizer, eos_token_ids(module, tokenizer), recommended, weights, guard)


def _layers_to_leave(
    model: str | os.PathLike[str],
    config: Any,
    loading: LoadOptions,
    compiling: CompileOptions,
    files: CheckpointFiles | None,
    others: ShippingRanks,
) -> LayersInFiles | None:
    """The layers that stay in the files, as the whole model does not fit beside what the ranks of this host hold.

    Raises:
        ValueError: it does not fit, and all of it has to be loaded.
    """
    # Imported here: it brings transformers' modules, which a start with a stored program never needs.
    from .checkpoint.layers_in_files import layers_to_leave

    name = check_source(model)
    if is_gguf(name):
        return None
    _, stored = stored_in(name, config, quantization_method(config, name))
    share = others.local_size / compiling.world_size
    why = all_layers_needed(compiling)
    return layers_to_leave(name, config, resolve_dtype(loading.dtype), stored, files, share, why)


@contextmanager
def _refusals_named(model: object) -> Iterator[None]:
    """Adds the model's name to each ``UnsupportedModel`` raised within, and an alternative if there is one."""
    try:
        yield
    except UnsupportedModel as error:
        name = f"{os.fspath(model)!r}" if isinstance(model, str | os.PathLike) else type(model).__name__
        refused = f"model={name} cannot be served: {error}"
        if isinstance(error, NotFinite):
            raise NotFinite(refused) from error
        raise UnsupportedModel(
            f'{refused}; use transformers\' own generate, which torch.compile(model, backend="pagoda") can accelerate'
        ) from error


def eos_token_ids(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Tokens that end a sequence: the generation config's, else the model config's, and the tokenizer's, as in vLLM.

    Negative ids, which in some configs mean none, are left out.

    Raises:
        ValueError: an id is not an integer.
    """
    configs = (getattr(module, "generation_config", None), module.config)
    configured = next((config for config in configs if getattr(config, "eos_token_id", None) is not None), None)
    ends: set[int] = set()
    for owner in (configured, tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            for token in found if isinstance(found, list | tuple) else [found]:
                if isinstance(token, bool) or not isinstance(token, Integral):
                    raise ValueError(
                        f"eos_token_id={found!r} of {type(owner).__name__} holds {token!r}; use token ids, such as 2"
                    )
                ends.add(int(token))
    return sorted(token for token in ends if token >= 0)
