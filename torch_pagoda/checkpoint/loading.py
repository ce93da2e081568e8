"""Loads a causal LM from a folder or the hub, and checks live modules."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.utils import cached_file

from ..compiler import CheckpointFiles
from ..compiler.capture.dynamic_rope import rope_types
from ..compiler.warm_start.checkpoint_files import Find
from ..runtime.ops.linear.stored_weight import StoredWeight
from .configs import causal_lm_class, load_config
from .gguf.checkpoint import GgufCheckpoint, open_gguf
from .gguf.container import BadGguf, is_gguf
from .quantized import (
    DESCRIPTIONS,
    Method,
    check_loaded,
    check_orientation,
    check_stored,
    quantization_method,
    refusal,
)
from .quantized_tensors import QuantizedFiles, read_quantized, unpacked_weights, warn_of_unpacked
from .source import check_source, one_line
from .stored_tensors import StoredTensor, of_files, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .layers_in_files import LayersInFiles

logger = logging.getLogger(__name__)

_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
}


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """Return the dtype with that name; None for ``"auto"``.

    Raises:
        ValueError: the dtype is not float32, bfloat16 or float16.
    """
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        return None
    if name not in _DTYPES:
        raise ValueError(f"dtype={name!r} is not supported; use 'auto', 'float32', 'bfloat16' or 'float16'")
    return _DTYPES[name]


def load_model(
    source: str | os.PathLike[str],
    dtype: str | torch.dtype,
    trust_remote_code: bool,
    device: torch.device,
    config: Any = None,
    layers: LayersInFiles | None = None,
) -> PreTrainedModel:
    """Load a causal LM for inference: in eval mode, with no parameter requiring gradients.

    Args:
        source: a folder written by ``save_pretrained``, a hub id, or a GGUF file.
        dtype: ``"auto"`` for the dtype of the checkpoint.
        trust_remote_code: run model code that comes with the checkpoint.
        device: device of the weights.
        config: the config that ``load_config`` returned; by default it is read here.
        layers: those that stay in the files, on a CPU; they are on the meta device then.

    Raises:
        ValueError: the source does not exist, is not a causal LM, is quantized in an unsupported way, or has missing
            or broken weights.
    """
    wanted = resolve_dtype(dtype)
    if config is None:
        _, config = load_config(source, trust_remote_code)
    name = check_source(source)
    if is_gguf(name):
        model = _load_gguf(name, config, wanted).eval().requires_grad_(False)
        return model if device.type == "cpu" else model.to(device)
    could_not = f"model={name!r}: could not load its weights"
    method = quantization_method(config, name)
    files, all_stored = stored_in(name, config, method)
    stored = all_stored if layers is None else layers.others(all_stored)
    if method is None:
        check_stored(all_stored, name)

        def load() -> Any:
            from transformers import AutoModelForCausalLM

            return AutoModelForCausalLM.from_pretrained(
                name,
                config=config,
                dtype=wanted if wanted is not None else "auto",
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below by name; transformers only says that there are some
            )

        with nullcontext() if layers is None else layers.left():
            model, report = one_line(could_not, lambda: _made(load, config))
        check_loaded(stored, model, report["unexpected_keys"], name)
    else:
        with nullcontext() if layers is None else layers.left():
            model, report = _load_quantized(name, config, method, files, stored, wanted)
    _check_report(report, model, name)
    if layers is not None:
        layers.reads(*_reading(name, method, files, all_stored, model))
        return model.eval().requires_grad_(False)
    if method is not None and device.type == "cpu":  # to() would access the memory of stored weights
        return model.eval().requires_grad_(False)
    return model.to(device).eval().requires_grad_(False)


def stored_in(name: str, config: Any, method: Method | None) -> tuple[list[str], dict[str, StoredTensor]]:
    """The weight files of a checkpoint, and their tensors.

    Raises:
        ValueError: there are none, or one cannot be read.
    """
    could_not = f"model={name!r}: could not load its weights"
    described, explicit = _described_weights(method), getattr(config, "transformers_weights", None)
    files = one_line(could_not, lambda: weight_files(name, explicit, described))
    return files, one_line(could_not, lambda: of_files(files))


def _reading(
    name: str, method: Method | None, files: list[str], stored: dict[str, StoredTensor], model: Any
) -> tuple[Callable[[Sequence[str]], dict[str, torch.Tensor]], Callable[[Mapping[str, torch.Tensor], Any], None]]:
    """How the tensors of a layer in the files are read, and the checks of ``load_model`` once it is loaded."""
    mapped = CheckpointFiles(files, {}).tensors() if method is None else {}

    def read(keys: Sequence[str]) -> dict[str, torch.Tensor]:
        if method is None:
            return {key: mapped[key] for key in keys}
        return dict(read_quantized(name, method, files, {key: stored[key] for key in keys}, model.dtype))

    def check(state: Mapping[str, torch.Tensor], report: Any) -> None:
        if method is not None:
            made = (key for key, tensor in state.items() if isinstance(tensor, StoredWeight))
            check_orientation(made, model, name, method)
        floats = {key for key, tensor in state.items() if not isinstance(tensor, StoredWeight)}
        plain = {key: stored[key] for key in floats & stored.keys()}
        check_loaded(plain, model, report["unexpected_keys"], name)
        _check_report(report, model, name)

    return read, check


def _check_report(report: Any, model: Any, name: str) -> None:
    """Check transformers' loading report for missing weights and wrong shapes."""
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        key, found, expected = mismatched[0]
        raise ValueError(
            f"model={name!r} holds {key!r} of shape {list(found)}, but its config implies {list(expected)}"
            f"{f', and {len(mismatched) - 1} more such' if len(mismatched) > 1 else ''}; pass a checkpoint whose "
            "config.json and weights belong together"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers would initialize them at random and only mention it in a report.
        raise ValueError(
            f"model={name!r} lacks {len(missing)} weights of {type(model).__name__}, for example {missing[0]!r}; "
            "pass a complete causal-LM checkpoint"
        )


_WEIGHTS_OF_MODELSLIM = "quant_model_weights*.safetensors"


def _load_quantized(
    name: str,
    config: Any,
    method: Method,
    files: list[str],
    stored: dict[str, StoredTensor],
    wanted: torch.dtype | None,
) -> tuple[Any, Any]:
    """Load a model over the stored weights; also returns transformers' loading report."""
    plain = without_quantization(config)
    model_class = causal_lm_class(config)
    if model_class is None:
        raise refusal(name, method.name, f"{method.evidence}, and it needs its own code")
    if getattr(model_class, "config_class", None) is type(plain).sub_configs.get("text_config"):
        plain = plain.get_text_config()
    dtype = wanted or getattr(plain, "dtype", None) or torch.bfloat16
    state = dict(read_quantized(name, method, files, stored, dtype))
    unpacked = unpacked_weights(method, state, stored)
    head = "lm_head.weight"
    if (isinstance(state.get(head), StoredWeight) or head in unpacked) and getattr(
        plain, "tie_word_embeddings", False
    ):
        plain.tie_word_embeddings = False  # the quantized head is a separate matrix
    model, report = _made_of(state, model_class, plain, dtype, name)
    made = {key for key, read in state.items() if isinstance(read, StoredWeight)} | unpacked
    check_orientation(made, model, name, method)
    plainly = {
        key: stored[key]
        for key, read in state.items()
        if key in stored and key not in unpacked and not isinstance(read, StoredWeight)
    }
    check_loaded(plainly, model, report["unexpected_keys"], name)
    if unpacked:
        warn_of_unpacked(name, method, len(unpacked), dtype)
    elif not any(isinstance(parameter, StoredWeight) for parameter in model.parameters()):
        raise refusal(name, method.name, f"{method.evidence}, but none of its weights is stored so")
    model.name_or_path = model.config._name_or_path = name
    try:
        model.generation_config = GenerationConfig.from_pretrained(name)
    except OSError:
        logger.debug("%s has no generation config", name)
    return model, report


def _made_of(
    state: dict[str, torch.Tensor], model_class: Any, config: Any, dtype: torch.dtype, name: str
) -> tuple[Any, Any]:
    """Build a model over these tensors; also returns transformers' loading report."""

    def load() -> Any:
        return model_class.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )

    found: tuple[Any, Any] = one_line(f"model={name!r}: could not load its weights", lambda: _made(load, config))
    return found


def _made(load: Callable[[], Any], config: Any) -> Any:
    """Run a loader of transformers; an unknown kind of rotary table raises an error that names it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        return load()
    except KeyError as error:
        if error.args and error.args[0] in rope_types(config):
            raise ValueError(
                f"its config's rope_type is {error.args[0]!r}, but transformers only knows 'default', "
                f"{', '.join(map(repr, ROPE_INIT_FUNCTIONS))}; correct rope_scaling in config.json"
            ) from error
        raise


def _load_gguf(name: str, config: Any, wanted: torch.dtype | None) -> Any:
    """Load a model over the weights of a GGUF file."""
    file = _of_gguf(name)
    dtype = wanted or resolve_dtype(file.values["dtype"]) or torch.bfloat16
    try:
        state = dict(file.tensors(dtype))
    except BadGguf as error:
        raise ValueError(f"model={name!r}: {error}") from error
    config = copy.deepcopy(config)
    model, report = _made_of(state, causal_lm_class(config), config, dtype, name)
    if report["unexpected_keys"]:
        raise ValueError(
            f"model={name!r} holds {min(report['unexpected_keys'])!r}, which {type(model).__name__} of this version "
            "of transformers does not have; pass the float checkpoint"
        )
    _check_report(report, model, name)
    model.name_or_path = model.config._name_or_path = name
    return model


def _of_gguf(name: str) -> GgufCheckpoint:
    """Open a GGUF file; errors name the argument."""
    try:
        return open_gguf(name)
    except BadGguf as error:
        raise ValueError(f"model={name!r}: {error}") from error


def quantized_tensors(name: str, config: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]] | None:
    """Iterate over the tensors of a quantized checkpoint, read one by one; None for a float checkpoint.

    Args:
        name: folder, hub id or GGUF file.
        config: config of the checkpoint.
        dtype: dtype that quantized weights appear in.

    Raises:
        ValueError: it is quantized, and its weights are missing or cannot be read.
    """
    if is_gguf(name):
        return _of_gguf(name).tensors(dtype)
    method = quantization_method(config, name)
    if method is None:
        return None
    files, stored = stored_in(name, config, method)
    return read_quantized(name, method, files, stored, dtype)


def without_quantization(config: Any) -> Any:
    """Return a copy of a config without any quantization entries, nested configs included."""
    plain = copy.deepcopy(config)
    for part in (plain, *(getattr(plain, key, None) for key in getattr(plain, "sub_configs", ()))):
        for key in ("quantization_config", "compression_config"):
            if getattr(part, key, None) is not None:
                delattr(part, key)
    return plain


def checkpoint_files(source: str | os.PathLike[str], dtype: str | torch.dtype) -> CheckpointFiles | None:
    """Return the files that can identify a checkpoint's program: safetensors, for a class of transformers itself.

    None for all other checkpoints, and for missing or broken ones: loading these reports the error.
    """
    try:
        name = check_source(source)
        if is_gguf(name):
            return _gguf_files(name, resolve_dtype(dtype))
        if Path(name).is_dir():
            folder = Path(name)
            texts = {"files": "\n".join(sorted(entry.name for entry in folder.iterdir()))}
        else:
            folder, texts = _snapshot(name)
        descriptions = {file.name for pattern in DESCRIPTIONS for file in folder.glob(pattern)}
        for text in ("config.json", "generation_config.json", *sorted(descriptions)):
            if (folder / text).is_file():
                texts[text] = (folder / text).read_text(encoding="utf-8")
        config = json.loads(texts["config.json"])
        method = quantization_method(config, str(folder))
        weights = weight_files(name, config.get("transformers_weights"), _described_weights(method))
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    if "auto_map" in config or not all(file.endswith(".safetensors") for file in weights):
        return None
    if method is None:
        return CheckpointFiles(weights, texts, resolve_dtype(dtype))
    if method.unpacks:  # the program's weights are not in the files
        return None
    texts["quantized by"] = method.name

    def read(shown: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        return read_quantized(name, method, weights, of_files(weights), shown)

    def find(shown: torch.dtype, in_parts: bool) -> Find:
        return QuantizedFiles(name, method, weights, of_files(weights), shown, in_parts=in_parts).find

    return CheckpointFiles(weights, texts, resolve_dtype(dtype), read, find)


def _gguf_files(name: str, wanted: torch.dtype | None) -> CheckpointFiles:
    file = open_gguf(name)
    return CheckpointFiles(
        [part.path for part in file.files],
        file.description,
        wanted,
        lambda dtype: open_gguf(name).tensors(dtype),
        raw=file.raw,
    )


def _described_weights(method: Method | None) -> str | None:
    """Return the name pattern of weight files next to their description; None for any other checkpoint."""
    return _WEIGHTS_OF_MODELSLIM if method is not None and method.kinds else None


def _snapshot(name: str) -> tuple[Path, dict[str, str]]:
    """Return the folder of a hub id in the hub's cache with the files that determine the model, downloaded as
    transformers would; and the texts that identify its version.

    The other contents of the folder depend on earlier requests; the commit identifies the version.

    Raises:
        OSError: the id does not exist, or nothing of it is cached while the hub is unreachable.
    """
    folder = Path(str(cached_file(name, "config.json"))).parent
    commit = folder.name  # so that the hub is queried only once
    cached_file(name, "generation_config.json", revision=commit, _raise_exceptions_for_missing_entries=False)
    return folder, {"hub id": name, "commit": commit}


def check_module(model: object, dtype: str | torch.dtype, device: torch.device) -> PreTrainedModel:
    """Check a live module and return it without a ``torch.compile`` wrapper.

    Raises:
        TypeError: not a HuggingFace model.
        ValueError: not a causal LM, in train() mode, on another device, or not of the requested dtype.
    """
    from transformers import PreTrainedModel

    model = getattr(model, "_orig_mod", model)
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        if isinstance(model, nn.Module) and isinstance(getattr(model, "base_model", None), nn.Module):
            raise TypeError(
                f"model is a {kind}, a wrapper; merge its adapters and pass the transformers model inside"
            )
        raise TypeError(f"model is a {kind}; pass a transformers causal LM, a checkpoint folder or a hub id")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"model is a {kind}, an encoder-decoder; pass a decoder-only causal LM")
    if not is_causal_lm(model):
        raise ValueError(f"model is a {kind}, which is not a causal LM; load it with AutoModelForCausalLM")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(f"model is a quantized {kind}, which is not supported; load it in float")
    if model.training:
        raise ValueError(
            f"model is a {kind} in train() mode, but the engine only runs inference; call model.eval() first"
        )
    if model.device.type != device.type:
        raise ValueError(
            f"model is on {model.device}, but device={str(device)!r}; call model.to({device.type!r}) first"
        )
    check_dtype(model, dtype)
    return model


def check_dtype(model: PreTrainedModel, dtype: str | torch.dtype) -> None:
    """Check that the dtype is the live module's own.

    Raises:
        ValueError: it differs, or is not a float dtype.
    """
    wanted = resolve_dtype(dtype)
    if wanted is not None and wanted != model.dtype:
        raise ValueError(
            f"dtype={str(wanted).removeprefix('torch.')!r} differs from the live module's "
            f"{str(model.dtype).removeprefix('torch.')}; call model.to({wanted}) first, or leave dtype='auto'"
        )


def is_causal_lm(model: PreTrainedModel) -> bool:
    """Return True if the module's class is a language-model head that predicts the next token."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = {base.__name__ for base in type(model).__mro__}
    return bool(names & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())) or (
        type(model).__name__.endswith("ForCausalLM") and model.get_output_embeddings() is not None
    )
