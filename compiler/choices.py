"""Compile options as plain data, importable by the command line without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..runtime.option import option

if TYPE_CHECKING:
    from .user_passes import Pattern


@dataclass(frozen=True)
class Choices:
    """The fields of ``CompileOptions``, not validated.

    Attributes:
        opt_level: 0 replaces attention only; 1 adds rewrites that are bitwise equal to level 0 when the graph runs
            uncompiled (``codegen="none"``); 2 adds the fusions.
        passes: ``{"skip": [names]}``, or ``{"only": [names]}``, which selects optional passes of any level: passes
            that are required, or that an option needs, always run. A pass that reads operators recognized by another
            (``merge_linears`` those of ``recognize_linear``) needs that one, too. {} runs all of the level.
        verify: "model" compares the finished program with the model on a few tokens. Where one decoder layer is
            compiled for all equal ones, it compares the compiled layers on several sequences and all layers on one.
            "full" compares all layers on all sequences; "every-pass" also after each pass; "off" disables the check.
        codegen: "none" runs the rewritten graph uncompiled. For a CPU: "inductor"; "auto" uses inductor above 50 M
            parameters if the passes left operators to fuse. For an NPU: "ge", by torchair through the graph engine;
            "aclgraph", captured at planned sizes and replayed; "auto" is "ge", without an NPU "none".
        static_decode: with codegen "ge": use static graphs for steps of one token per sequence, one for each planned
            number of sequences. The results stay the same.
        target: "cpu" or "npu", or "auto" for that of the model's device. A model on the CPU lowered for an NPU runs
            the reference kernels of ``runtime.ops.npu``: slowly, for inspection and comparison.
        soc: the Ascend chip, such as "Ascend910B3"; "auto": the installed one, without one that example.
        cann: the release of the CANN toolkit to lower for, such as "9.1"; "auto": the installed one, see
            ``installed_cann``.
        pack_weights: store the matrices of a paged program in the layout of the CPU's or NPU's matrix kernels, in
            addition to the model's own (which ``LLM(path)`` frees).
        kv_cache_dtype: dtype of the paged KV cache. "auto": that of keys and values; "int8": one byte per element and
            a float32 scale per token and head, about half of bfloat16's memory, with rounding.
        quantization: quantize the weights of a paged program's linear layers to 8 or 4 bits, "int8" or "int4", and
            their inputs to 8 bits, or with the suffix "-weight-only" to 16; None: no quantization. An NPU supports
            all but "int4", and leaves inputs of 16 bits unchanged.
        group_size: inputs of a quantized weight that share a scale, a multiple of 64, or 0 for all; None: as a
            calibrated model records (see ``recorded_grid``), else 256 for 8 bits and 128 for 4, and on an NPU all for
            8 bits. Quantized inputs have the same groups.
        input_bits: for a checkpoint with weights for 8-bit inputs (W8A8): 16 keeps 16-bit inputs, closer to the
            original model and slower; None rounds inputs to 8 bits, as intended.
        batch_invariant: CPU only: a token's logits are bitwise independent of the batch, of the chunks of its prompt,
            and of the number of threads. Weights are not packed.
        tensor_parallel_size: ranks that hold each layer together, each a part of its heads, features and experts.
        pipeline_parallel_size: stages that hold some of the layers each, of ``tensor_parallel_size`` ranks.
        expert_parallel_size: groups of these ranks that hold different experts; it divides ``tensor_parallel_size``.
            Within a group each rank holds a part of each expert's features. None: as many as there are ranks, or
            fewer where there are fewer experts.
        enable_expert_parallel: True is ``expert_parallel_size=tensor_parallel_size``, False is 1, as in vLLM.
        npu_options: NPU only: options of the toolchain behind ``codegen``, by its own names: fields of npugraph_ex's
            ``CompilerConfig`` for "aclgraph", such as ``{"static_kernel_compile": True}``, paths in torchair's for
            "ge", such as ``{"ge_config.enable_single_stream": True}``. See ``targets.npu.toolchain_options``.
        schedule: NPU only: schedules by name, ``{"streams": True}`` to run branches of decode steps on a second
            stream, ``{"prefetch": True}`` to fetch their weights early, ``{"super_kernels": True}`` to fuse launches
            of their operators; see ``targets.npu.schedule_options``. Only the timing of launches and the contents of
            the L2 cache change.
        patterns: user-defined rewrites; see ``Pattern``.
    """

    opt_level: int = option(2, "0 to 2.")
    passes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    verify: str = option("model", "model, full, every-pass or off.")
    codegen: str = option("auto", "auto, none, inductor, ge or aclgraph.")
    static_decode: bool = option(False, "With ge: static graphs for decode steps.")
    target: str = option("auto", "auto, cpu or npu.")
    soc: str = option("auto", "Ascend chip to lower for, e.g. Ascend910B3; auto: the installed one.")
    cann: str = option("auto", "CANN release to lower for, e.g. 9.1; auto: the installed one.")
    pack_weights: bool = False
    kv_cache_dtype: str = option("auto", "auto, or int8 for half the memory.")
    quantization: str | None = option(
        None, "int8 or int4 for weights, with inputs of 8 bits; of 16 if -weight-only follows."
    )
    group_size: int | None = option(None, "Inputs of a quantized weight that share a scale.")
    input_bits: int | None = option(None, "Of a W8A8 checkpoint: 16 keeps more of the inputs, slower.")
    batch_invariant: bool = option(False, "On a CPU: the same numbers in every batch, bit for bit; slower.")
    tensor_parallel_size: int = option(
        1, "Processes that hold each layer together.", flags=("--tensor-parallel-size", "-tp")
    )
    pipeline_parallel_size: int = option(
        1, "Stages of processes that hold some of the layers each.", flags=("--pipeline-parallel-size", "-pp")
    )
    expert_parallel_size: int | None = option(
        None, "Groups of them that hold different experts, each cut within its group."
    )
    enable_expert_parallel: bool | None = option(
        None, "Experts in as many groups as processes.", flags=("--enable-expert-parallel",)
    )
    npu_options: Mapping[str, Any] = option({}, "Options of codegen ge or aclgraph.")
    schedule: Mapping[str, bool] = option(
        {}, 'Schedules of decode steps on an NPU: {"streams": true, "prefetch": true, "super_kernels": true}.'
    )
    patterns: Sequence[Pattern] = ()
