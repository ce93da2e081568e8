"""The options that LLM(...), pagoda.compile(...) and torch.compile(options={...}) share."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ..passes import PASSES, Pass
from ..runtime.npu_target import DEFAULT_BLOCK_SIZE, DEFAULT_SOC, NpuTarget
from ..runtime.ops.quantized_weight import DEFAULT_GROUP_SIZES, Quantization, check_group_size
from .targets.npu.offline.run import is_offline
from .targets.npu.schedule_options import asked_for, check_schedule
from .targets.npu.toolchain_options import check_options
from .user_passes import OPT_LEVELS, Pattern, with_user_passes

VERIFY = ("model", "off", "every-pass")
CODEGEN = ("auto", "none", "inductor", "ge", "aclgraph")
_CODEGEN_OF_NPU = ("ge", "aclgraph")
_QUANTIZATIONS_OF_NPU = ("int8", "int8-weight-only", "int4-weight-only")
TARGETS = ("auto", "cpu", "npu")
KV_CACHE_DTYPES = ("auto", "int8")
_FLOATS_OF_FEW_BITS = ("fp8", "float8", "e4m3", "e5m2", "fp4", "nvfp4", "mxfp")
_CACHE_DTYPES_OF_MODELS = ("bfloat16", "float16", "float32")
INPUT_BITS = (None, 8, 16)
QUANTIZATIONS = ("int8", "int8-weight-only", "int4", "int4-weight-only")
AUTO_CODEGEN_PARAMETERS = 50_000_000


@dataclass(frozen=True)
class CompileOptions:
    """The choices that a model is compiled with.

    Attributes:
        opt_level: 0 swaps attention only; 1 adds rewrites that are bitwise equal to level 0 when the graph runs as
            it is (``codegen="none"``); 2 adds the fusions.
        passes: ``{"skip": [names]}``, or ``{"only": [names]}``, which chooses among the optional ones, of any level:
            those that a program cannot be made without and those that an option of their own asks for run beside
            them. One that reads what another recognises (``merge_linears`` what ``recognise_linear`` does) needs that
            one named too. {} runs all of the level.
        verify: "model" compares the finished program with the model on a few tokens; "every-pass" also after
            each pass; "off" trusts.
        codegen: "none" runs the rewritten graph as it is. For a CPU: "inductor"; "auto" takes inductor above 50 M
            parameters where the passes left it something to fuse. For an NPU: "ge", by torchair through the graph
            engine; "aclgraph", captured at planned sizes and replayed; "auto" is "ge", without an NPU "none".
        static_decode: with codegen "ge": give steps of one token per sequence graphs of fixed sizes, one for each
            planned number of sequences. Nothing changes but how they run.
        target: "cpu" or "npu", or "auto" for what the model's device asks for. Lowered for an NPU, a model on the CPU
            runs by the reference kernels of ``runtime.ops.npu``: slowly, to look at and to compare.
        soc: the Ascend chip, such as "Ascend910B3"; "auto" for the one that is there, or else that one.
        block_size: npu only: tokens per block of the KV cache; the operators bake it in.
        pack_weights: keep the matrices of a paged program in the layout of the CPU's or NPU's matrix kernels, beside
            the model's own (``LLM(path)`` lets go of those).
        kv_cache_dtype: of the paged KV cache. "auto": that of keys and values; "int8": a byte each and a float32
            scale per token and head, about half of bfloat16's memory, at the price of rounding.
        quantization: round the weights of a paged program's linear layers to 8 or 4 bits, "int8" or "int4", and their
            inputs to 8 bits, or where "-weight-only" follows to 16; None keeps the model's numbers. An NPU takes
            all but "int4", and leaves inputs as they are where they keep 16 bits.
        group_size: inputs of a quantized weight that share a scale, a multiple of 64, or 0 for all; None is what a
            calibrated model records (see ``recorded_grid``), else 256 for 8 bits and 128 for 4, and on an NPU all for
            8 bits. Rounded inputs have the same groups.
        input_bits: of a checkpoint whose weights were made for inputs of 8 bits (W8A8): 16 keeps so many, nearer
            to the weights' own model and slower; None rounds inputs to 8, as it was made.
        batch_invariant: cpu only: a token's logits do not change by a bit with its batch mates, with the chunks that
            its prompt is computed in, or with the number of threads. Weights are read where they lie, not packed.
        npu_options: npu only: options of the toolchain behind ``codegen``, by its own names: fields of npugraph_ex's
            ``CompilerConfig`` for "aclgraph", such as ``{"static_kernel_compile": True}``, paths in torchair's for
            "ge", such as ``{"ge_config.enable_single_stream": True}``. See ``targets.npu.toolchain_options``.
        schedule: npu only: schedules by name, ``{"streams": True}`` to run branches of decode steps on a second
            stream, ``{"prefetch": True}`` to fetch their weights early, ``{"super_kernels": True}`` to launch runs of
            their operators as one, see ``targets.npu.schedule_options``. Nothing changes but when launches run and
            what lies in the cache.
        patterns: rewrites of the user's own, see ``Pattern``.
    """

    opt_level: int = 2
    passes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    verify: str = "model"
    codegen: str = "auto"
    static_decode: bool = False
    target: str = "auto"
    soc: str = "auto"
    block_size: int = DEFAULT_BLOCK_SIZE
    pack_weights: bool = False
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    group_size: int | None = None
    input_bits: int | None = None
    batch_invariant: bool = False
    npu_options: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, bool] = field(default_factory=dict)
    patterns: Sequence[Pattern] = ()

    def __post_init__(self) -> None:
        _one_of("opt_level", self.opt_level, OPT_LEVELS)
        _one_of("verify", self.verify, VERIFY)
        _one_of("codegen", self.codegen, CODEGEN)
        _one_of("target", self.target, TARGETS)
        _one_of("pack_weights", self.pack_weights, (True, False))
        _one_of("batch_invariant", self.batch_invariant, (True, False))
        _one_of("static_decode", self.static_decode, (True, False))
        if self.static_decode and (self.target == "cpu" or self.codegen not in ("auto", "ge")):
            raise self._no_static_decode()
        if self.batch_invariant and self.codegen not in ("auto", "none"):
            raise ValueError(
                f"codegen={self.codegen!r} does not keep batch_invariant=True, whose order of sums generated code "
                "does not know; leave one of them out"
            )
        _check_kv_cache_dtype(self.kv_cache_dtype)
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        if self.group_size is not None:
            if self.quantization is None:
                raise ValueError(f"group_size={self.group_size!r} is for quantized weights; give quantization too")
            check_group_size(self.group_size)
        _one_of("input_bits", self.input_bits, INPUT_BITS)
        if self.input_bits is not None and self.quantization is not None:
            raise ValueError(
                f"input_bits={self.input_bits} is for checkpoints whose weights are rounded already; leave it out: "
                f"quantization={self.quantization!r} says how inputs are rounded"
            )
        if self.target == "npu" and self.codegen == "inductor":
            raise ValueError(
                "codegen='inductor' is for target='cpu'; for an NPU use 'ge', 'aclgraph', 'none' or 'auto'"
            )
        if self.target == "cpu" and self.codegen in _CODEGEN_OF_NPU:
            raise ValueError(
                f"codegen={self.codegen!r} is for target='npu'; for a CPU use 'inductor', 'none' or 'auto'"
            )
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int) or self.block_size % 16:
            raise ValueError(
                f"block_size={self.block_size!r} is not a multiple of 16, as Ascend's attention needs it"
            )
        self.npu_target()  # raises for what it does not know
        if not isinstance(self.passes, Mapping) or len(self.passes) > 1 or set(self.passes) - {"skip", "only"}:
            raise ValueError(
                f'passes={self.passes!r} is not understood; give {{"skip": [names]}} or {{"only": [names]}}'
            )
        if not isinstance(self.npu_options, Mapping) or not all(isinstance(name, str) for name in self.npu_options):
            raise ValueError(
                f"npu_options={self.npu_options!r} is not understood; give a dictionary of options by name"
            )
        asked_for(self.schedule)  # raises for what it does not know
        for pattern in self.patterns:
            if not isinstance(pattern, Pattern):
                raise ValueError(f"patterns holds {pattern!r}; give torch_pagoda.Pattern(search, replace, inputs)")
        known = [p.name for p in with_user_passes(PASSES, self.patterns)]
        for names in self.passes.values():
            if isinstance(names, str) or not isinstance(names, Sequence):
                raise ValueError(f"passes={self.passes!r} needs a list of pass names")
            for name in names:
                if name not in known:
                    raise ValueError(f"passes names an unknown pass {name!r}{_hint(str(name), known)}")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any] | None) -> CompileOptions:
        """Options from a plain dict.

        Raises:
            ValueError: an unknown key or a value that an option does not take.
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
        """The same with a definite target, and for an NPU a definite codegen: what "auto" means on ``device``.

        Args:
            device: "cpu" or "npu".

        Raises:
            ValueError: the codegen does not fit the target, or needs a device that is not there.
        """
        target = ("npu" if device == "npu" else "cpu") if self.target == "auto" else self.target
        codegen = self.codegen
        if target == "npu" and codegen == "auto":
            codegen = "ge" if device == "npu" else "none"
        simulated = target == "npu" and device != "npu"
        if self.static_decode and (target, codegen) != ("npu", "ge"):
            raise replace(self, static_decode=False, target=target, codegen=codegen)._no_static_decode()
        if target == "npu" and self.batch_invariant:
            raise ValueError("batch_invariant=True is for target='cpu' so far; leave it out, or use the CPU")
        if target == "npu":
            self._check_quantization_of_npu()
        if simulated and codegen in _CODEGEN_OF_NPU and not (codegen == "ge" and is_offline()):
            where = ", or a Python with the real torchair (pagoda npu python)" if codegen == "ge" else ""
            raise ValueError(
                f"codegen={codegen!r} needs an NPU{where}, and the model is on {device!r}; leave it out to run by "
                "the reference kernels"
            )
        if self.npu_options and target != "npu":
            raise ValueError(f"npu_options={dict(self.npu_options)!r} are for target='npu'; leave them out")
        check_options(self.npu_options, codegen, self.npu_target(device).product)
        check_schedule(self.schedule, target, codegen, static_decode=self.static_decode, npu_options=self.npu_options)
        return replace(self, target=target, codegen=codegen)

    def _no_static_decode(self) -> ValueError:
        if self.target == "cpu":
            why = f"target={self.target!r}; leave it out, or use target='npu' with codegen='ge'"
        elif self.codegen == "aclgraph":
            why = "codegen='aclgraph', whose graphs have fixed sizes already; leave it out, or use codegen='ge'"
        else:
            why = f"codegen={self.codegen!r}, which makes no graphs for the graph engine; use codegen='ge'"
        return ValueError(f"static_decode=True is not for {why}")

    def _check_quantization_of_npu(self) -> None:
        if self.quantization not in (None, *_QUANTIZATIONS_OF_NPU):
            raise ValueError(
                f"quantization={self.quantization!r} is for target='cpu': no product of an NPU takes it; use "
                f"{' or '.join(map(repr, _QUANTIZATIONS_OF_NPU))}, or the CPU"
            )
        if self.quantization == "int8" and self.group_size:
            raise ValueError(
                f"group_size={self.group_size!r} is for target='cpu': with quantization='int8' an NPU has one scale "
                "for each output; leave group_size out"
            )

    def npu_target(self, device: str = "cpu") -> NpuTarget:
        """The facts that lowering for an NPU has to know.

        Args:
            device: that runs the graph. On an NPU, calls that go one by one are lowered like captured ones.

        Raises:
            ValueError: a chip or a block size that there is not.
        """
        as_called = self.codegen == "aclgraph" or (self.codegen == "none" and device == "npu")
        soc = installed_soc() if self.soc == "auto" else self.soc
        return NpuTarget(soc, self.block_size, "aclgraph" if as_called else "ge")

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
        """True if a pass is to run."""
        if entry.option and not getattr(self, entry.option):
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

    def uses_inductor(self, parameters: int, fusible: bool) -> bool:
        """True if a model goes through inductor.

        Args:
            parameters: how many it has.
            fusible: its lowered graph holds operators of which inductor makes fewer (see ``is_fusible``).
        """
        if self.batch_invariant:
            return False
        if self.codegen == "auto":
            return fusible and parameters > AUTO_CODEGEN_PARAMETERS
        return self.codegen == "inductor"


def selected_passes(options: CompileOptions, stage: str = "") -> list[Pass]:
    """The passes that ``options`` asks for, in order; only those of ``stage`` when it is given."""
    passes = with_user_passes(PASSES, options.patterns)
    return [p for p in passes if options.selects(p) and stage in ("", p.stage)]


def installed_soc() -> str:
    """Name of the Ascend chip of this machine; the one that is assumed where there is none."""
    module = getattr(torch, "npu", None)
    return str(module.get_device_name()) if module is not None and module.is_available() else DEFAULT_SOC


def _one_of(option: str, given: object, allowed: Sequence[Any], remedy: str = "one of them") -> None:
    if given not in allowed:
        raise ValueError(f"{option}={given!r} is not one of {', '.join(map(repr, allowed))}; use {remedy}")


def _check_kv_cache_dtype(given: object) -> None:
    """Raise ``ValueError`` for what is no choice; names that vLLM knows are answered with what to use."""
    name = given.lower() if isinstance(given, str) else ""
    if name.startswith(_FLOATS_OF_FEW_BITS):
        raise ValueError(
            f"kv_cache_dtype={given!r} is not there: no kernel reads keys and values that are floats of 8 or 4 bits; "
            "use 'int8', which takes a byte for each too and has a scale per token and head, or 'auto'"
        )
    if name in _CACHE_DTYPES_OF_MODELS:
        raise ValueError(
            f"kv_cache_dtype={given!r} is not one of {', '.join(map(repr, KV_CACHE_DTYPES))}; use 'auto', which "
            f"stores what the model computes, and give the model dtype={given!r}"
        )
    if name.startswith("int8"):
        _one_of("kv_cache_dtype", given, KV_CACHE_DTYPES, "'int8', which has a scale per token and head")
    _one_of("kv_cache_dtype", given, KV_CACHE_DTYPES)


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
