"""Loads a model that does not fit into a host's memory: most decoder layers stay in the files until they run.

transformers stacks experts and converts dtypes as it loads, so that these weights are in this process's own memory,
whatever the system could take back of mapped files. Of a layer that stays in the files, transformers' own code makes
them where the layer runs.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import core_model_loading, modeling_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import logging as transformers_logging

from ..compiler import CheckpointFiles
from ..compiler.capture.layer_repeat import LayerRepeat
from ..compiler.weights.file_pages import FilePages
from ..compiler.weights.tensor_contents import module_tensors
from ..runtime.cache.kv_cache import available_memory
from .configs import causal_lm_class
from .loading import without_quantization
from .quantized import Method, quantization_method, split_name
from .source import first_line
from .stored_tensors import StoredTensor

log = logging.getLogger(__name__)

_lock = threading.RLock()

Read = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
"""Reads tensors of the files; yields them by the names of a float checkpoint."""


class LayersInFiles:
    """Layers that stay in the files (``compiler.verify.streamed_reference.LayersInFiles``).

    Args:
        repeat: the layers of the model, on the meta device; those from ``repeat.kept`` on stay in the files.
        keys: layer → names of its tensors in the files.

    Attributes:
        repeat: of the model that is loaded, once it is.
    """

    def __init__(self, repeat: LayerRepeat, keys: Mapping[int, Sequence[str]]) -> None:
        self.repeat = repeat
        self._keys = keys
        self._in_files = {key for index in range(repeat.kept, repeat.total) for key in keys[index]}
        self._settings: Any = None
        self._read: Read | None = None
        self._check: Callable[[Mapping[str, torch.Tensor], Any], None] | None = None
        self._held: dict[int, tuple[Mapping[str, torch.Tensor], list[tuple[nn.Module, str, Any]]]] = {}

    def others(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Those of the checkpoint's tensors that are loaded at once."""
        return {key: tensor for key, tensor in tensors.items() if key not in self._in_files}

    @contextmanager
    def left(self) -> Iterator[None]:
        """Let transformers leave the layers on the meta device while it loads the model, in this thread."""
        thread, convert = threading.get_ident(), modeling_utils.convert_and_load_state_dict_in_model

        def convert_others(model: Any, state_dict: Any, load_config: Any, *more: Any, **named: Any) -> Any:
            if threading.get_ident() != thread:
                return convert(model, state_dict, load_config, *more, **named)
            self.repeat, self._settings = replace(self.repeat, model=model), load_config
            state = {key: tensor for key, tensor in state_dict.items() if key not in self._in_files}
            info, index = convert(model, state, load_config, *more, **named)
            in_files = {name for name in info.missing_keys if self._is_in_files(name)}
            info.missing_keys -= in_files
            for name in in_files:
                model.get_parameter_or_buffer(name)._is_hf_initialized = True
            return info, index

        with _lock:
            modeling_utils.convert_and_load_state_dict_in_model = convert_others
            try:
                yield
            finally:
                modeling_utils.convert_and_load_state_dict_in_model = convert

    def reads(self, read: Read, check: Callable[[Mapping[str, torch.Tensor], Any], None]) -> None:
        """Say how tensors of the layers are read, and what checks them with transformers' report of loading them."""
        self._read, self._check = read, check

    def load(self, index: int) -> None:
        """Let transformers load a layer.

        Raises:
            ValueError: one of its weights is missing or broken.
        """
        assert self._read is not None and self._check is not None
        model: Any = self.repeat.model
        path = f"{self.repeat.path}.{index}"
        places = [
            (module, name, held)
            for module in model.get_submodule(path).modules()
            for tensors in (module._parameters, module._buffers)
            for name, held in tensors.items()
            if held is not None and held.is_meta
        ]
        state = self._read(self._keys[index])
        self._held[index] = state, places
        with _without_progress():
            info, _ = core_model_loading.convert_and_load_state_dict_in_model(model, dict(state), self._settings)
        if info.conversion_errors:
            raise ValueError(
                f"the weights of {path} cannot be converted: {next(iter(info.conversion_errors.values()))}"
            )
        model._adjust_missing_and_unexpected_keys(info)
        info.missing_keys = {name for name in info.missing_keys if name.startswith(f"{path}.")}
        self._check(state, info.to_dict())
        model.get_submodule(path).eval().requires_grad_(False)

    def free(self, index: int) -> None:
        """Put the layer's weights back on the meta device, and give back the memory that mirrors the files."""
        state, places = self._held.pop(index, ({}, []))
        for module, name, form in places:
            (module._buffers if name in module._buffers else module._parameters)[name] = form
        FilePages(state.values()).drop_tensors(state.values())

    def _is_in_files(self, name: str) -> bool:
        index = _layer_of(name, self.repeat.path)
        return index is not None and self.repeat.kept <= index < self.repeat.total


def layers_to_leave(
    name: str,
    config: Any,
    dtype: torch.dtype | None,
    stored: Mapping[str, StoredTensor],
    files: CheckpointFiles | None,
    share: float,
    whole: str,
) -> LayersInFiles | None:
    """The layers of a model that stay in the files; None where all of it fits into memory.

    Args:
        name: the checkpoint's folder or hub id.
        config: its config.
        dtype: of the weights; None for the checkpoint's own.
        stored: its tensors.
        files: the checkpoint's, if its layers can be read one by one.
        share: of the model that the ranks on this host will hold beside it.
        whole: why all layers have to be loaded; "" if they need not.

    Raises:
        ValueError: it does not fit, and its layers cannot stay in the files.
    """
    kind, method = causal_lm_class(config), quantization_method(config, name)
    model = None if kind is None else _without_data(kind, config, dtype or _dtype_of(config, stored))
    if model is None:
        return None
    names = _names_in_model(model, stored, method)
    parameters = model.state_dict()
    made = total = 0
    for key, (target, is_made) in names.items():
        size, is_own = _held_bytes(stored[key], is_made, parameters.get(target))
        total += size
        made += size if is_own else 0
    free = available_memory()
    if not made or made + share * total <= free:
        return None
    repeat = LayerRepeat.of(model)
    reason = whole or _why_not(model, repeat, files)
    if reason or repeat is None:
        if made > free:
            raise ValueError(
                f"model={name!r}: rank 0 loads it to compare, and {made / 2**30:.1f} GiB of it that transformers "
                f"converts do not fit into {free / 2**30:.1f} GiB; its layers cannot be loaded one by one: {reason}"
            )
        log.warning("model=%r may not fit into this host's memory, and all of it is loaded: %s", name, reason)
        return None
    keys = defaultdict(list)
    for key, (target, _) in names.items():
        index = _layer_of(target, repeat.path)
        if index is not None:
            keys[index].append(key)
    return LayersInFiles(repeat, keys)


def _why_not(model: Any, repeat: LayerRepeat | None, files: CheckpointFiles | None) -> str:
    """Why layers cannot stay in the files; "" if they can."""
    if files is None or files.raw is not None:
        return "its files are not safetensors, or it has code of its own; save it with transformers' save_pretrained"
    if repeat is None:
        return "they are few, not alike, or run other code than transformers'"
    inside = f"{repeat.path}."
    tied = model.all_tied_weights_keys
    shared = next((name for name in (*tied, *tied.values()) if name.startswith(inside)), None)
    known: dict[int, str] = {}
    for name, tensor in module_tensors(model).items():
        first = known.setdefault(id(tensor), name)
        if first != name and inside in (first[: len(inside)], name[: len(inside)]):
            shared = shared or name
    return f"{shared!r} is shared by several" if shared else ""


def _without_data(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """The model on the meta device; None where it cannot be made there."""
    config = without_quantization(config)
    if getattr(kind, "config_class", None) is type(config).sub_configs.get("text_config"):
        config = config.get_text_config()
    try:
        with torch.device("meta"):
            return kind._from_config(config, dtype=dtype).eval().requires_grad_(False)
    except Exception as error:  # a model that computes with its buffers while it is made
        log.info("cannot tell whether %s fits into memory: %s", kind.__name__, first_line(error))
        return None


def _dtype_of(config: Any, stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """The dtype that transformers loads floats in by default."""
    text = config.get_text_config()
    named = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    first = next((t.dtype for t in stored.values() if t.dtype in ("float32", "bfloat16", "float16")), "bfloat16")
    return named if isinstance(named, torch.dtype) else getattr(torch, str(named or first))


def _names_in_model(
    model: Any, stored: Mapping[str, StoredTensor], method: Method | None
) -> dict[str, tuple[str, bool]]:
    """Of each tensor in the files, the parameter that it becomes (a part of), and whether that is made anew."""
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, core_model_loading.WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, core_model_loading.WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    found = {}
    for key in stored:
        owner, leaf = split_name(key)
        is_code = method is not None and bool(method.is_companion(leaf))
        given = f"{owner}.weight" if is_code else key
        target, converted = core_model_loading.rename_source_key(given, renamings, converters, prefix, state)
        if target not in state and given in state:
            target, converted = core_model_loading.rename_source_key(given, [], [], prefix, state)
        found[key] = target, bool(converted) or is_code
    return found


def _held_bytes(stored: StoredTensor, is_made: bool, parameter: torch.Tensor | None) -> tuple[int, bool]:
    """Bytes that a tensor of the files takes once it is (a part of) a parameter; True if they are not mapped.

    Of a dtype that torch does not name so, a byte for each number.
    """
    dtype = getattr(torch, stored.dtype, None)
    size = math.prod(stored.shape)
    if not isinstance(dtype, torch.dtype):
        return size, is_made
    converts = dtype.is_floating_point and parameter is not None and parameter.dtype != dtype
    width = parameter.dtype.itemsize if converts and parameter is not None else dtype.itemsize
    return size * width, is_made or converts


def _layer_of(name: str, path: str) -> int | None:
    found = re.match(rf"{re.escape(path)}\.(\d+)\.", name)
    return None if found is None else int(found[1])


@contextmanager
def _without_progress() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
