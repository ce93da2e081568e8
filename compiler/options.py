"""The options shared by LLM(...), pagoda.compile(...) and torch.compile(options={...})."""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import torch

from ..passes import PASSES, Pass
from ..runtime.cann_toolkit import toolkit_folder, toolkit_version
from ..runtime.npu_target import DEFAULT_BLOCK_SIZE, DEFAULT_SOC, NEWEST_CANN, OLDEST_CANN, NpuTarget
from ..runtime.ops.linear.quantized_weight import DEFAULT_GROUP_SIZES, Quantization, check_group_size
from .choices import Choices
from .option_conflicts import check_conflicts
from .targets.npu.schedules.schedule_options import asked_for
from .targets.npu.toolchain_options import check_options
from .targets.npu.without_device import is_offline
from .user_passes import OPT_LEVELS, Pattern, with_user_passes

VERIFY = ("model", "full", "every-pass", "off")
CODEGEN = ("auto", "none", "inductor", "ge", "aclgraph")
TARGETS = ("auto", "cpu", "npu")
KV_CACHE_DTYPES = ("auto", "int8")
_FLOATS_OF_FEW_BITS = ("fp8", "float8", "e4m3", "e5m2", "fp4", "nvfp4", "mxfp")
_CACHE_DTYPES_OF_MODELS = ("bfloat16", "float16", "float32")
INPUT_BITS = (None, 8, 16)
QUANTIZATIONS = ("int8", "int8-weight-only", "int4", "int4-weight-only")
MOST_RANKS = 128
AUTO_CODEGEN_PARAMETERS = 50_000_000
_CHOICES: Mapping[str, Sequence[Any]] = {
    "opt_level": OPT_LEVELS,
    "verify": VERIFY,
    "codegen": CODEGEN,
    "target": TARGETS,
    "quantization": (*QUANTIZATIONS, None),
    "input_bits": INPUT_BITS,
    **dict.fromkeys(("pack_weights", "batch_invariant", "static_decode"), (True, False)),
}


@dataclass(frozen=True)
class CompileOptions(Choices):
    """The options of compiling a model, validated, and their resolution for a device.

    Attributes:
        block_size: NPU only: tokens per block of the KV cache; a constant in the operators.
        taps_hidden: the program also yields the hidden rows of all tokens, for a head that drafts.

    Raises:
        ValueError: an invalid value, or a conflict of options.
    """

    block_size: int = DEFAULT_BLOCK_SIZE
    taps_hidden: bool = False

    def __post_init__(self) -> None:
        for option, allowed in _CHOICES.items():
            _one_of(option, getattr(self, option), allowed)
        _check_kv_cache_dtype(self.kv_cache_dtype)
        if self.group_size is not None:
            check_group_size(self.group_size)
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            ranks = getattr(self, name)
            if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MOST_RANKS:
                raise ValueError(f"{name}={ranks!r} is not a number from 1 to {MOST_RANKS}; give one")
        object.__setattr__(self, "expert_parallel_size", self._expert_groups())
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int) or self.block_size % 16:
            raise ValueError(
                f"block_size={self.block_size!r} is not a multiple of 16, which Ascend's attention requires; use one"
            )
        self.npu_target()  # raises for what it does not know
        if not isinstance(self.passes, Mapping) or len(self.passes) > 1 or set(self.passes) - {"skip", "only"}:
            raise ValueError(f'passes={self.passes!r} is invalid; use {{"skip": [names]}} or {{"only": [names]}}')
        if not isinstance(self.npu_options, Mapping) or not all(isinstance(name, str) for name in self.npu_options):
            raise ValueError(f"npu_options={self.npu_options!r} is invalid; use a dictionary of options by name")
        asked_for(self.schedule)  # raises for what it does not know
        for pattern in self.patterns:
            if not isinstance(pattern, Pattern):
                raise ValueError(f"patterns has {pattern!r}; use torch_pagoda.Pattern(search, replace, inputs)")
        known = [p.name for p in with_user_passes(PASSES, self.patterns)]
        for names in self.passes.values():
            if isinstance(names, str) or not isinstance(names, Sequence):
                raise ValueError(f"passes={self.passes!r} is invalid; give lists of pass names")
        passes = {key: [_american(name, known) for name in names] for key, names in self.passes.items()}
        object.__setattr__(self, "passes", passes)
        for name in chain.from_iterable(passes.values()):
            if name not in known:
                raise ValueError(f"passes names an unknown pass {name!r}{_hint(str(name), known)}")
        check_conflicts(vars(self))

    @classmethod
    def from_dict(cls, options: Mapping[str, Any] | None) -> CompileOptions:
        """Options from a plain dict.

        Raises:
            ValueError: an unknown key or an invalid value.
        """
        options = dict(options or {})
        known = [f.name for f in fields(cls)]
        for key in options:
            if key not in known:
                raise ValueError(f"unknown option {key!r} (given {options[key]!r}){_hint(str(key), known)}")
        for name in ("passes", "npu_options", "schedule"):
            if options.get(name) is None:
                options.pop(name, None)
        return cls(**options)

    def for_device(self, device: str) -> CompileOptions:
        """Resolve "auto" for ``device``: a definite target, and for an NPU a definite codegen.

        Args:
            device: "cpu" or "npu".

        Raises:
            ValueError: the codegen does not match the target, or needs an unavailable device.
        """
        target = ("npu" if device == "npu" else "cpu") if self.target == "auto" else self.target
        codegen = self.codegen
        if target == "npu" and codegen == "auto":
            codegen = "ge" if device == "npu" else "none"
        chosen = replace(self, target=target, codegen=codegen)
        if target == "npu" != device and codegen in ("ge", "aclgraph") and not (codegen == "ge" and is_offline()):
            where = ", or a Python with the real torchair (pagoda npu python)" if codegen == "ge" else ""
            raise ValueError(
                f"codegen={codegen!r} needs an NPU{where}, but the model is on {device!r}; omit it to run the "
                "reference kernels"
            )
        check_options(self.npu_options, codegen, chosen.npu_target(device).product)
        return chosen

    def npu_target(self, device: str = "cpu") -> NpuTarget:
        """The facts needed to lower for an NPU.

        Args:
            device: runs the graph. On an NPU, graphs without code generation are lowered like captured ones.

        Raises:
            ValueError: an unknown chip or CANN release, or an invalid block size.
        """
        as_called = self.codegen == "aclgraph" or (self.codegen == "none" and device == "npu")
        soc = installed_soc() if self.soc == "auto" else self.soc
        cann = installed_cann() if self.cann == "auto" else self.cann
        tried_on = "npu" if device == "npu" else ""
        return NpuTarget(soc, self.block_size, "aclgraph" if as_called else "ge", cann, tried_on)

    def _expert_groups(self) -> int | None:
        """``expert_parallel_size``, which ``enable_expert_parallel`` may name.

        Raises:
            ValueError: it does not divide the number of ranks, or the two differ.
        """
        ranks, asked, spread = self.tensor_parallel_size, self.expert_parallel_size, self.enable_expert_parallel
        _one_of("enable_expert_parallel", spread, (True, False, None))
        if spread is not None:
            named = ranks if spread else 1
            if asked not in (None, named):
                raise ValueError(
                    f"expert_parallel_size={asked} and enable_expert_parallel={spread}, which is "
                    f"expert_parallel_size={named}, differ; omit one of them"
                )
            asked = named
        divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
        if asked is not None and (type(asked) is not int or asked not in divisors):
            known = " or ".join(map(str, divisors))
            raise ValueError(
                f"expert_parallel_size={asked!r} does not divide tensor_parallel_size={ranks}; use {known}"
            )
        return asked

    @property
    def world_size(self) -> int:
        """The number of processes that run the program together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def packs(self) -> bool:
        """True if the options request packed weights."""
        return bool(self.pack_weights or self.quantization)

    @property
    def cache_dtype(self) -> torch.dtype | None:
        """The dtype that ``kv_cache_dtype`` names; None for that of keys and values."""
        return torch.int8 if self.kv_cache_dtype == "int8" else None

    @property
    def weight_quantization(self) -> Quantization | None:
        """The scheme that ``quantization`` and ``group_size`` name."""
        if self.quantization is None:
            return None
        bits = 8 if self.quantization.startswith("int8") else 4
        default = 0 if self.target == "npu" and bits == 8 else DEFAULT_GROUP_SIZES[bits]
        size = default if self.group_size is None else self.group_size
        return Quantization(bits, size, input_bits=16 if self.quantization.endswith("-weight-only") else 8)

    def selects(self, entry: Pass) -> bool:
        """True if a pass should run."""
        if entry.option and not self._asks_for(entry.option):
            return False
        if entry.option == "batch_invariant":
            return True  # a promise, which no list of passes takes back
        if entry.target and entry.target != ("npu" if self.target == "npu" else "cpu"):
            return False
        if "only" in self.passes:
            return entry.required or bool(entry.option) or entry.name in self.passes["only"]
        if entry.level > self.opt_level:
            return False
        return entry.name not in self.passes.get("skip", ())

    def _asks_for(self, option: str) -> bool:
        """True if an option that a pass is for is set; one rank needs no pass for several."""
        given = getattr(self, option)
        return given > 1 if option == "tensor_parallel_size" else bool(given)

    def uses_inductor(self, parameters: int, fusible: bool) -> bool:
        """True if a model should be compiled by inductor.

        Args:
            parameters: number of its parameters.
            fusible: inductor would fuse operators of its lowered graph (see ``is_fusible``).
        """
        if self.batch_invariant:
            return False
        if self.codegen == "auto":
            return fusible and parameters > AUTO_CODEGEN_PARAMETERS
        return self.codegen == "inductor"


def selected_passes(options: CompileOptions, stage: str = "") -> list[Pass]:
    """The passes that ``options`` selects, in order; only those of ``stage`` if given."""
    passes = with_user_passes(PASSES, options.patterns)
    return [p for p in passes if options.selects(p) and stage in ("", p.stage)]


def installed_soc() -> str:
    """Name of this machine's Ascend chip; the default one if there is none."""
    module = getattr(torch, "npu", None)
    return str(module.get_device_name()) if module is not None and module.is_available() else DEFAULT_SOC


def installed_cann() -> str:
    """Version of this machine's CANN toolkit.

    Where it does not say: the first release whose limits are known if there is a device, which must not be given a
    call that it may not take, else the last one.
    """
    version = toolkit_version(toolkit_folder(os.environ))
    if version is not None:
        return version
    module = getattr(torch, "npu", None)
    return OLDEST_CANN if module is not None and module.is_available() else NEWEST_CANN


def _one_of(option: str, given: object, allowed: Sequence[Any], remedy: str = "one of them") -> None:
    if given not in allowed:
        raise ValueError(f"{option}={given!r} is not one of {', '.join(map(repr, allowed))}; use {remedy}")


def _check_kv_cache_dtype(given: object) -> None:
    """Raise ``ValueError`` for an invalid dtype; for names known from vLLM with the alternative."""
    name = given.lower() if isinstance(given, str) else ""
    if name.startswith(_FLOATS_OF_FEW_BITS):
        raise ValueError(
            f"kv_cache_dtype={given!r} is not supported (no FP8/FP4 KV-cache kernel); use 'int8' (1 byte per "
            "element, one scale per token and head) or 'auto'"
        )
    if name in _CACHE_DTYPES_OF_MODELS:
        raise ValueError(
            f"kv_cache_dtype={given!r} is not one of {', '.join(map(repr, KV_CACHE_DTYPES))}; use 'auto', which "
            f"stores the model's dtype, and set dtype={given!r}"
        )
    if name.startswith("int8"):
        _one_of("kv_cache_dtype", given, KV_CACHE_DTYPES, "'int8', which has a scale per token and head")
    _one_of("kv_cache_dtype", given, KV_CACHE_DTYPES)


def _american(name: str, known: Sequence[str]) -> str:
    """The current name of a pass with an old spelling (``quantise_linears``); other names are unchanged."""
    new = re.sub("(recogn|quant)is", r"\1iz", str(name))
    if new == name or name in known or new not in known:
        return name
    warnings.warn(f"passes: {name!r} was renamed to {new!r}", DeprecationWarning, stacklevel=5)
    return new


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; use one of {', '.join(known)}"
