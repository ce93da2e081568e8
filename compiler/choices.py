"""The choices that a model is compiled with, as plain data, which a command line reads without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..runtime.option import option

if TYPE_CHECKING:
    from .user_passes import Pattern


@dataclass(frozen=True)
class Choices:
    """The fields of ``CompileOptions``, unchecked.

    Attributes:
        opt_level: 0 swaps attention only; 1 adds rewrites that are bitwise equal to level 0 when the graph runs as
            it is (``codegen="none"``); 2 adds the fusions.
        passes: ``{"skip": [names]}``, or ``{"only": [names]}``, which chooses among the optional ones, of any level:
            those that a program cannot be made without and those that an option of their own asks for run beside
            them. One that reads what another recognizes (``merge_linears`` what ``recognize_linear`` does) needs that
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
        cann: release of the CANN toolkit to lower for, such as "9.1"; "auto" for the one that is installed, see
            ``installed_cann``.
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

    opt_level: int = option(2, "0 to 2.")
    passes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    verify: str = option("model", "model, every-pass or off.")
    codegen: str = option("auto", "auto, none, inductor, ge or aclgraph.")
    static_decode: bool = option(False, "With ge: graphs of fixed sizes for decode steps.")
    target: str = option("auto", "auto, cpu or npu.")
    soc: str = option("auto", "Ascend chip to lower for, e.g. Ascend910B3; auto: the one that is there.")
    cann: str = option("auto", "CANN release to lower for, e.g. 9.1; auto: the one that is installed.")
    pack_weights: bool = False
    kv_cache_dtype: str = option("auto", "auto, or int8 for half the memory.")
    quantization: str | None = option(
        None, "int8 or int4 for weights (and inputs, unless -weight-only follows) of so many bits."
    )
    group_size: int | None = option(None, "Inputs of a rounded weight that share a scale.")
    input_bits: int | None = option(None, "Of a W8A8 checkpoint: 16 keeps more of the inputs, slower.")
    batch_invariant: bool = option(False, "On a CPU: the same numbers in every batch, bit for bit; slower.")
    npu_options: Mapping[str, Any] = option({}, "Options of codegen ge or aclgraph.")
    schedule: Mapping[str, bool] = option(
        {}, 'Schedules of decode steps on an NPU: {"streams": true, "prefetch": true, "super_kernels": true}.'
    )
    patterns: Sequence[Pattern] = ()
