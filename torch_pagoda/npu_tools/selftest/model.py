"""The model and the device of a test, as every stage opens them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...checkpoint.configs import load_config
from ...checkpoint.loading import load_model
from ...compiler.options import CompileOptions
from ...runtime.processors import limit_threads
from .device import Device
from .numbers import plain
from .worker import Items

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Asked", "load", "open_device", "stage"]


@dataclass(frozen=True)
class Asked:
    """Parameters of every stage.

    Attributes:
        model: folder, hub id or GGUF file.
        dtype: "auto" for the checkpoint's.
        trust_remote_code: run code that comes with the checkpoint.
        quantization, kv_cache_dtype, passes: see ``CompileOptions``.
        block_size: tokens per block of the cache.
        max_num_seqs, max_num_batched_tokens: sizes of the engines that are compared and timed.
        comparisons: names of comparisons; empty: the default ones.
        tensor_parallel_size: ranks of the stage ``ranks``.
        device: "module:function" that makes the ``Device``.
        device_arguments: arguments of that function.
    """

    model: str
    dtype: str = "auto"
    trust_remote_code: bool = False
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    passes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    block_size: int = 128
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    comparisons: Sequence[str] = ()
    tensor_parallel_size: int = 1
    device: str = "torch_pagoda.npu_tools.selftest.device:npu"
    device_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """The compile options of every stage."""
        return {
            "quantization": self.quantization,
            "kv_cache_dtype": self.kv_cache_dtype,
            "passes": self.passes,
        }


def open_device(asked: Asked) -> Device:
    """The device that ``asked`` names."""
    module, _, name = asked.device.partition(":")
    made: Device = getattr(importlib.import_module(module), name)(**asked.device_arguments)
    return made


def load(asked: Asked, device: torch.device) -> PreTrainedModel:
    """The model on a device; uses no more threads than the control group allows."""
    limit_threads()
    return load_model(asked.model, asked.dtype, asked.trust_remote_code, device)


def stage(**asked: Any) -> Items:
    """The first stage: properties of device and model, and whether the device computes at all."""
    given = Asked(**asked)
    device = open_device(given)
    options = {"block_size": given.block_size, **given.options, "soc": device.soc}
    CompileOptions.from_dict({"target": "npu", **options}).npu_target()  # raises for mistakes
    return {"device": lambda progress: _device(device), "model": lambda progress: _model(given)}


def _device(device: Device) -> dict[str, Any]:
    """A copy to the device and back, and an exact product of matrices of small integers."""
    numbers = torch.randint(-2, 3, (256, 256), generator=torch.Generator().manual_seed(0)).to(torch.float16)
    there = numbers.to(device.torch_device)
    wrong = (
        ""
        if torch.equal(device.run(lambda: there.clone()).cpu(), numbers)
        else "a copy to the device and back is not equal"
    )
    product = device.run(lambda: there @ there).cpu()
    exact = (numbers.long() @ numbers.long()).half()
    largest = float((product.float() - exact.float()).abs().max())
    if not torch.equal(product, exact):  # at most 1024; float16 has every integer to 2048
        wrong = wrong or f"a product of matrices of small integers differs by {largest:.3g}"
    return {
        "wrong": wrong,
        "facts": {**device.facts, "lowered for": device.soc},
        "stand_in": device.stand_in,
        "largest": plain(largest),
    }


def _model(asked: Asked) -> dict[str, Any]:
    """Architecture and sizes, without name and folder."""
    _, config = load_config(asked.model, asked.trust_remote_code)
    text = config.get_text_config()
    names = {
        "layers": "num_hidden_layers",
        "hidden size": "hidden_size",
        "heads": "num_attention_heads",
        "heads of keys": "num_key_value_heads",
        "vocabulary": "vocab_size",
        "experts": "num_experts",
    }
    facts = {word: str(size) for word, name in names.items() if (size := getattr(text, name, None)) is not None}
    dtype = str(getattr(config, "dtype", None) or asked.dtype).removeprefix("torch.")
    return {"wrong": "", "facts": {"architecture": str(text.model_type), **facts, "dtype": dtype}}
