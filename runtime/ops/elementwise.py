"""`pagoda::elementwise`: functions of single numbers, independent of their position.

torch's own take vectors where they can and single numbers at the ends of what each thread gets, by other formulas:
the last bit of a cosine depends on how many tokens a step has.
"""

from __future__ import annotations

import struct

import torch

from .native import FLOAT_CODES, kernel_function
from .registration import Facts, like_input, register_operator

aten = torch.ops.aten

_SCHEMA = "elementwise(Tensor input, str function) -> Tensor"
_ARGUMENTS = struct.Struct("=6q")  # ElementwiseArguments in csrc/elementwise.cpp

FUNCTIONS = {"cos": aten.cos, "sin": aten.sin, "tanh": aten.tanh, "exp": aten.exp, "sigmoid": aten.sigmoid}
"""By name, in the order of the kernel's numbers."""
_NUMBERS = {name: i for i, name in enumerate(FUNCTIONS)}


def elementwise_reference(input: torch.Tensor, function: str) -> torch.Tensor:
    """A function of each element, computed in float32 and rounded once.

    Args:
        input: ``[...]``, fp32, bf16 or fp16.
        function: "cos", "sin", "tanh", "exp" or "sigmoid".

    Returns:
        shape and dtype of ``input``, contiguous.

    Raises:
        ValueError: an unknown function.
    """
    _check(function)
    return FUNCTIONS[function](input.float()).to(input.dtype).contiguous()


def elementwise_cpu(input: torch.Tensor, function: str) -> torch.Tensor:
    """:func:`elementwise_reference` by the C++ kernel.

    Raises:
        RuntimeError: there are no kernels, or none for the dtype; torch's functions would not be the same everywhere.
    """
    _check(function)
    kernel = kernel_function("pagoda_elementwise")
    code = FLOAT_CODES.get(input.dtype)
    if kernel is None or code is None:
        reason = "the C++ kernels" if kernel is None else f"a kernel for {input.dtype}"
        raise RuntimeError(f"pagoda::elementwise needs {reason}; compile without batch_invariant")
    input = input.contiguous()
    result = torch.empty_like(input)
    arguments = (code, input.numel(), _NUMBERS[function], torch.get_num_threads())
    kernel(_ARGUMENTS.pack(input.data_ptr(), result.data_ptr(), *arguments))
    return result


def _check(function: str) -> None:
    if function not in FUNCTIONS:
        raise ValueError(f"function is {function!r}; it must be one of {', '.join(FUNCTIONS)}")


elementwise = register_operator(
    _SCHEMA,
    Facts(over="elements", invariant=True, kind="", spelled_out=False),
    fake=like_input,
    reference=elementwise_reference,
    cpu=elementwise_cpu,
)
