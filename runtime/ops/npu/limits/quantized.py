"""Limits of the operators on rounded numbers: op-plugin docs npu_dynamic_quant, npu_quant_matmul,
npu_weight_quant_batchmatmul, npu_add_rms_norm_dynamic_quant, npu_add_rms_norm_quant and npu_dequant_swiglu_quant."""

from __future__ import annotations

import torch

from ..int4 import PER_INT32
from ..numerics import DTYPES_BY_CODE
from .call import Call
from .rules import A2, A3, A5, FLOAT, HALF, INFERENCE, INT8, Limits, dense, given, lowered, shaped

_MAX_QUANT_DIM = 65535
"""The largest last dim of both inputs of npu_quant_matmul."""
INT4_GROUP = 256
"""Inputs that share a scale of 4 bits beside rows of int8."""
INT4_INPUTS_BELOW = 29576
"""Of K there."""
INT4_GROUP_SIZES = (0, 0, INT4_GROUP)
"""``group_sizes`` there: along M, N and K, 0 where none is said."""
_MAX_WEIGHT_DIM = 65535
"""Of K and N of npu_weight_quant_batchmatmul."""
_GROUP_MULTIPLE = 32
"""Of its inputs that share a scale; at least so many, and fewer than all."""
_MAX_GROUPED_SWIGLU, _GROUPED_SWIGLU_MULTIPLE = 10496, 64
"""The size of the result of npu_dequant_swiglu_quant with ``group_index``: the largest, and what divides it."""
QINT8 = 12
"""As ``dtype`` of npu_quantize spells it."""
_MIN_NORM_SIZE = 32
"""Of npu_add_rms_norm_quant on the inference chip."""


def _per_row_int8(call: Call) -> str:
    """npu_dynamic_quant: int8 with a scale per row; other modes and groups are for other chips or need smoothing."""
    if call["quant_mode"] != "pertoken" or call["dst_type"] not in (None, 1) or call["dst_type_max"]:
        return "quant_mode must be 'pertoken', dst_type int8, dst_type_max 0"
    return "group_index needs smooth_scales" if call["group_index"] is not None else ""


def _quantized_by_scales(call: Call) -> str:
    """npu_quantize by division: numbers of 8 bits, one scale and one offset for all or for each place of the axis."""
    if call["div_mode"] is not True or call["dtype"] != QINT8:
        return f"div_mode must be True, dtype qint8 ({QINT8})"
    size = call.shape("input")[call["axis"]]
    for name in ("scales", "zero_points"):
        if call.tensor(name) is not None and call.shape(name) not in ((1,), (size,)):
            return f"{name} is {call.shape(name)}; (1,) or {(size,)}"
    return ""


def _quant_matmul(call: Call) -> str:
    """npu_quant_matmul by matrices of 8 bits, or of 4 in int32."""
    weight = call.tensor("x2")
    assert weight is not None
    if weight.dtype is torch.int32:
        return _quant_matmul_int4(call, weight)
    if not call.is_reference:
        if call["group_sizes"] is not None:
            return f"group_sizes is {call['group_sizes']}; None beside matrices of 8 bits"
        given = {name: call.tensor(name) for name in ("scale", "pertoken_scale")}
        ranks = {name: tensor.dim() for name, tensor in given.items() if tensor is not None}
        if set(ranks.values()) != {1}:
            return f"ranks of scales are {ranks}; 1 beside matrices of 8 bits"
    return _quant_matmul_dtypes(call) or _quant_matmul_shapes(call)


def _quant_matmul_int4(call: Call, weight: torch.Tensor) -> str:
    """Rows of int8 by 4 bits in groups: the K-G form of CANN's aclnnQuantMatmulV5 on A2 and A3.

    The form is one of QuantBatchMatmulV4; torchair makes V3 of every product on these chips, which has no attribute
    for groups, and hands on the int32 that hold 4 bits beside int8 as they are.
    """
    if call.target.product not in (A2, A3):
        return "this chip multiplies no int8 by 4 bits"
    if call.target.graph_mode == "ge":
        return "torchair makes QuantBatchMatmulV3 of it, with int32 for 4 bits and without group_sizes"
    code = call["output_dtype"]
    if not call.is_reference and not call.is_half(None if code is None else DTYPES_BY_CODE.get(code)):
        return f"output_dtype is {code}; bfloat16 (15) or float16 (5) beside matrices of 4 bits"
    *more, rows, width = call.shape("x1")
    inputs, packed = call.shape("x2")
    if more or inputs is None or packed is None or width != inputs or not weight.is_contiguous():
        return f"x1 is {(rows, width)} and x2 {(inputs, packed)}; [M, K] and [K, N / 8] without gaps"
    outputs = packed * PER_INT32
    if inputs % INT4_GROUP or inputs >= INT4_INPUTS_BELOW or outputs > _MAX_QUANT_DIM:
        return (
            f"a matrix of {(inputs, outputs)}; a multiple of {INT4_GROUP} inputs below {INT4_INPUTS_BELOW}, and at "
            f"most {_MAX_QUANT_DIM} outputs"
        )
    wanted = {
        "scale": (torch.int64, (inputs // INT4_GROUP, outputs)),
        "offset": (torch.float32, (outputs,)),
        "pertoken_scale": (torch.float32, (rows, 1)),
    }
    for name, (dtype, sizes) in wanted.items():
        tensor = call.tensor(name)
        if tensor is None or tensor.dtype is not dtype or call.shape(name) != sizes:
            found = None if tensor is None else f"{tensor.dtype} {call.shape(name)}"
            return f"{name} is {found}; {dtype} {sizes} beside matrices of 4 bits in groups of {INT4_GROUP}"
    sizes = call["group_sizes"]
    if sizes is None or tuple(sizes) != INT4_GROUP_SIZES:
        return f"group_sizes is {sizes}; {list(INT4_GROUP_SIZES)} beside matrices of 4 bits"
    return "there is no bias beside matrices of 4 bits" if call["bias"] is not None else ""


def _quant_matmul_dtypes(call: Call) -> str:
    """What npu_quant_matmul takes together.

    Its result is int8 unless ``output_dtype`` says otherwise. Without scales of rows a graph takes scales of fp16
    results as int64 only, the bits of float32, and biases as int32.
    """
    code = call["output_dtype"]
    result = torch.int8 if code is None else call.target.counted(DTYPES_BY_CODE.get(code, torch.bool))
    if not call.is_half(result) and not call.is_reference:
        return f"output_dtype is {code}, {'int8' if code is None else result}; bfloat16 (15) or float16 (5)"
    scale, rows, bias = (call.tensor(name) for name in ("scale", "pertoken_scale", "bias"))
    assert scale is not None
    if scale.dtype is torch.bfloat16 and result not in (torch.bfloat16, torch.int32):
        return f"scale is torch.bfloat16 beside a result of {result}; it must be torch.float32"
    if call.target.product is INFERENCE:
        return "this chip takes no pertoken_scale, and matrices in FRACTAL_NZ turned ones only"
    wanted = torch.int64 if rows is None and result is torch.float16 else torch.float32
    of_bits = scale.dtype is torch.int64
    if of_bits is not (wanted is torch.int64) and (of_bits or not call.is_reference):
        return f"scale is {scale.dtype} beside a result of {result}; it must be {wanted}"
    if rows is None:
        is_graph = result is torch.float16 and not call.is_reference
        if is_graph and bias is not None and bias.dtype is not torch.int32:
            return f"bias is {bias.dtype}; torch.int32 beside a result of {result} without pertoken_scale"
    elif rows.dtype is not torch.float32:
        return f"pertoken_scale is {rows.dtype}; it must be torch.float32"
    if bias is not None and bias.dtype not in (torch.int32, torch.float32) and bias.dtype is not result:
        return f"bias is {bias.dtype}; torch.int32, torch.float32 or {result}"
    return "offset is for results of int8" if call["offset"] is not None and result is not torch.int8 else ""


def _quant_matmul_shapes(call: Call) -> str:
    """``[M, K]`` by ``[K, N]``, or the transposed view of ``[N, K]``; last dims up to 65535."""
    x1, x2 = call.shape("x1"), call.shape("x2")
    outputs = x2[1]
    if x1[-1] != x2[0]:
        return f"x1 is {x1} and x2 {x2}"
    for name, size in (("x1", x1[-1]), ("x2", outputs)):
        if size is None or size > _MAX_QUANT_DIM:
            return f"the last dim of {name} is {size}; at most {_MAX_QUANT_DIM}"
    tensor = call.tensor("x2")
    assert tensor is not None
    if not (tensor.is_contiguous() or tensor.t().is_contiguous()):
        return "x2 is neither contiguous nor the transposed view of what is"
    for name, sizes in (("scale", ((1,), (outputs,))), ("bias", ((outputs,),)), ("pertoken_scale", (x1[:-1],))):
        if call.tensor(name) is not None and call.shape(name) not in sizes:
            return f"{name} is {call.shape(name)} beside x1 {x1} and x2 {x2}"
    return ""


def _weight_quant_matmul(call: Call) -> str:
    """npu_weight_quant_batchmatmul over 8 bits, or 4 in int32, with results of 16 bits.

    Its offsets are added to the numbers before these are scaled. Scales as int64, and results of int8, are refused.
    """
    weight, scale = call.tensor("weight"), call.tensor("antiquant_scale")
    assert weight is not None and scale is not None
    packed = weight.dtype is torch.int32
    if packed and call.target.product is INFERENCE:
        return "this chip reads no weights of 4 bits"
    if packed and not weight.is_contiguous():
        return "weight is torch.int32 and not contiguous"
    x, (inputs, outputs) = call.shape("x"), call.shape("weight")
    if inputs is None or outputs is None or x[1] != inputs:
        return f"x is {x} and weight {call.shape('weight')}"
    outputs *= PER_INT32 if packed else 1
    if max(inputs, outputs) > _MAX_WEIGHT_DIM:
        return f"the weight is {(inputs, outputs)}; both sizes at most {_MAX_WEIGHT_DIM}"
    group = call["antiquant_group_size"]
    if group and (group % _GROUP_MULTIPLE or not _GROUP_MULTIPLE <= group < inputs):
        return f"groups of {group} of {inputs} inputs; a multiple of {_GROUP_MULTIPLE}, and fewer than all"
    sizes = [(-(-inputs // group), outputs)] if group else [(outputs,), (1, outputs), (1,)]
    if call.shape("antiquant_scale") not in sizes:
        return f"antiquant_scale is {call.shape('antiquant_scale')}; {sizes[0]}"
    if call["antiquant_offset"] is not None and call.shape("antiquant_offset") != call.shape("antiquant_scale"):
        return f"antiquant_offset is {call.shape('antiquant_offset')}; {call.shape('antiquant_scale')}"
    bias = call.tensor("bias")
    if bias is not None:
        wanted = torch.float32 if call.dtype("x") is torch.bfloat16 else call.dtype("x")
        if bias.dtype is not wanted or tuple(bias.shape) not in ((outputs,), (1, outputs)):
            return f"bias is {bias.dtype} {tuple(bias.shape)}; {wanted} {(outputs,)} beside {call.dtype('x')}"
    given = [name for name in ("quant_scale", "quant_offset", "weight_dtype") if call[name] is not None]
    return f"{given[0]} is given" if given else ""


def one_quantized_result(call: Call) -> str:
    """npu_add_rms_norm_dynamic_quant: the second result needs a second smoothing."""
    mask = call["output_mask"]
    if mask is None or list(mask) != [True, False]:
        return f"output_mask is {mask}; [True, False]"
    given = [name for name in ("smooth_scale1", "smooth_scale2", "beta", "y_dtype") if call[name] is not None]
    return f"{given[0]} is given" if given else ""


def norm_by_scales(call: Call) -> str:
    """npu_add_rms_norm_quant by division, with a scale and an offset for each place of the norm and one result.

    Scales of float32 with offsets of int32 beside bfloat16 are in the operator's definition for A2 and A3 and among
    its compiled kernels (CANN's ops-nn, ``add_rms_norm_quant_def.cpp``, ``AddRmsNormQuant_bf16_2`` in ``config``),
    from the first published version on, which belongs to the oldest CANN that has the operator in torch_npu (8.3).
    The tables of aclnnAddRmsNormQuant and of op-plugin lack them.
    """
    if call["axis"] != -1 or call["div_mode"] is not True or call["dst_type"] not in (None, 1):
        return "axis must be -1, div_mode True, dst_type int8"
    given = [name for name in ("beta", "scales2", "zero_points2") if call[name] is not None]
    if given:
        return f"{given[0]} is given"
    scales, offsets, size = call.tensor("scales1"), call.tensor("zero_points1"), call.shape("gamma")[0]
    assert scales is not None
    for name, tensor in (("scales1", scales), ("zero_points1", offsets)):
        if tensor is not None and call.shape(name) != (size,):
            return f"{name} is {call.shape(name)}; {(size,)}"
    exact = scales.dtype is torch.float32 and (offsets is None or offsets.dtype is torch.int32)
    halves = {call.dtype(name) for name in ("scales1", "zero_points1")} <= {torch.bfloat16, None}
    if not exact and (call.dtype("x1") is torch.float16 or not halves):
        found = f"{scales.dtype} and {offsets.dtype if offsets is not None else None}"
        wanted = "float32 and int32" + ("" if call.dtype("x1") is torch.float16 else ", or bfloat16 both")
        return f"scales1 and zero_points1 are {found}; {wanted} beside {call.dtype('x1')}"
    if call.target.product is INFERENCE and (size is None or size < _MIN_NORM_SIZE):
        return f"norms of {size}; at least {_MIN_NORM_SIZE} on this chip"
    return ""


def _swiglu_of_left_half(call: Call) -> str:
    """npu_dequant_swiglu_quant: the gate is the left half, which the operator does not take for it by itself."""
    if call["activate_left"] is not True or call["quant_mode"] != 1 or call["swiglu_mode"] != 0:
        return "activate_left must be True, quant_mode 1, swiglu_mode 0"
    if call["bias"] is not None or call["quant_offset"] is not None or call["quant_scale"] is not None:
        return "bias, quant_scale and quant_offset are not given"
    return ""


def _scales_of_sums(call: Call) -> str:
    size = call.shape("x")[1]
    if size is None or size % 2:
        return f"dim 1 of x is {size}; it must be even"
    scales = [name for name in ("weight_scale", "activation_scale") if call[name] is not None]
    if call.dtype("x") is torch.int32:
        if len(scales) < 2:
            return "x is torch.int32; weight_scale and activation_scale are needed"
    elif scales:
        return f"{scales[0]} is for sums of torch.int32"
    if call["group_index"] is None and call["weight_scale"] is not None and call.shape("weight_scale")[0] != 1:
        return f"weight_scale is {call.shape('weight_scale')}; a row for all without group_index"
    return _grouped_swiglu(call, size // 2)


def _grouped_swiglu(call: Call, size: int) -> str:
    """Its limits where rows come in groups, which ``group_index`` counts."""
    groups = call.tensor("group_index")
    if groups is None:
        return ""
    if groups.dtype is not torch.int64 or groups.dim() != 1:
        return f"group_index is {groups.dtype} of {groups.dim()} dims; counts of torch.int64"
    if size > _MAX_GROUPED_SWIGLU or size % _GROUPED_SWIGLU_MULTIPLE:
        step, most = _GROUPED_SWIGLU_MULTIPLE, _MAX_GROUPED_SWIGLU
        return f"results of {size} with group_index; a multiple of {step} up to {most}"
    return ""


LIMITS = {
    "npu_dynamic_quant": Limits(
        frozenset({A2, A3, A5}),
        {"input": HALF},
        ranks={"input": tuple(range(2, 9))},
        rules=[lowered(_per_row_int8), shaped("input [*B, N], smooth_scales [N]")],
    ),
    "npu_quantize": Limits(
        frozenset({A2, A3, INFERENCE}),
        {
            "input": FLOAT,
            "scales": frozenset({torch.float32, torch.bfloat16}),
            "zero_points": frozenset({torch.int8, torch.uint8, torch.int32, torch.bfloat16}),
        },
        forms={"scales": (1,), "zero_points": (1,)},
        rules=[lowered(_quantized_by_scales)],
    ),
    # The document names no 950; torchair has a branch of its own for it (QuantBatchMatmulV4).
    "npu_quant_matmul": Limits(
        frozenset({A2, A3, A5, INFERENCE}),
        {
            "x1": INT8,
            "x2": frozenset({torch.int8, torch.int32}),
            "scale": frozenset({torch.float32, torch.bfloat16, torch.int64}),
        },
        ranks={"x1": tuple(range(2, 7)), "x2": (2,), "scale": (1, 2), "bias": (1,)},
        forms={"x1": (2,), "pertoken_scale": (1, 2)},
        rules=[_quant_matmul, dense("x1")],
    ),
    "npu_weight_quant_batchmatmul": Limits(
        frozenset({A2, A3, INFERENCE}),
        {"x": HALF, "weight": frozenset({torch.int8, torch.int32})},
        alike=[("x", "antiquant_scale", "antiquant_offset")],
        ranks={"x": (2,), "weight": (2,)},
        rules=[_weight_quant_matmul, lowered(given("inner_precise", 0))],
    ),
    "npu_dequant_swiglu_quant": Limits(
        frozenset({A2, A3}),
        {"x": HALF | {torch.int32}},
        ranks={"x": (2,)},
        rules=[
            lowered(_swiglu_of_left_half),
            _scales_of_sums,
            shaped("x [T, N], weight_scale [G, N], activation_scale [T, 1], group_index [G]"),
            dense("x"),
        ],
    ),
}
