"""Weights that stay as a quantized checkpoint stores them: a tensor subclass that shows the weight that they mean.

Whatever computes with one computes with ``dense()`` of it, made for that operator and freed behind it. So the model's
own forward over such parameters is what its numbers are compared with, and no dense copy of the model is ever made.
Only what moves whole outputs or whole matrices about (transposes, slices, stacks, concatenations along outputs)
yields a stored weight again: transformers' loaders do that where they rename and fuse parameters.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..native import FLOAT_CODES, kernel_function
from .weight_format import CODES, SCALE_DTYPES, InputScale, WeightFormat, values_of

_aten = torch.ops.aten

# Field for field the struct StoredWeightArguments of csrc/stored_weight.cpp.
_ARGUMENTS = struct.Struct("=19q")

_MOST_AT_ONCE = 1 << 20
"""Weights that are computed together."""
_BYTES_AT_ONCE = 2 << 20
"""Of a weight that is unpacked for a product."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class StoredWeight(torch.Tensor):
    """A quantized weight ``[*, out, in]`` (``[*, in, out]`` where it is ``transposed``) that looks like a dense one.

    Attributes:
        form: how it is stored.
        codes: uint8 ``[*, out, in]``, or ``[*, out, in / 2]`` with the first of two in the low half of a byte.
        scales: ``[*, out, groups]``, in the dtype of ``form.scale``.
        zeros: uint8 ``[*, out, groups]``, of affine codes float32; None: ``2^(bits - 1)``, and nothing for codes that
            are floats.
        order: int32 ``[in]``: of column k of the codes, the column of the weight; None: the same.
        transposed: the last two dims are exchanged.
        input_scale: of inputs that the weight was made for, with ``form.static_inputs``; else None. It does not count
            for what the weight means.
    """

    form: WeightFormat
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    transposed: bool
    input_scale: InputScale | None

    @staticmethod
    def __new__(
        cls,
        form: WeightFormat,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        *,
        dtype: torch.dtype,
        transposed: bool = False,
        input_scale: InputScale | None = None,
    ) -> StoredWeight:
        """A weight of these parts, which are not copied.

        Args:
            form: how it is stored.
            codes, scales, zeros, order: its parts.
            dtype: that the weight is shown in.
            transposed: show it transposed.
            input_scale: of the inputs.

        Raises:
            ValueError: shapes or dtypes of the parts do not fit ``form`` and each other.
        """
        check_parts(form, codes, scales, zeros, order)
        if (input_scale is not None) != form.static_inputs:
            raise ValueError(f"input_scale is {input_scale}, which does not fit {form}")
        sizes = [*codes.shape[:-1], codes.shape[-1] * form.per_byte]
        if transposed:
            sizes[-2:] = reversed(sizes[-2:])
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, sizes, dtype=dtype, device=torch.device("meta" if codes.is_meta else "cpu"), requires_grad=False
        )
        made.form, made.codes, made.scales, made.zeros, made.order = form, codes, scales, zeros, order
        made.transposed, made.input_scale = transposed, input_scale
        return made  # type: ignore[no-any-return]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def dense(self) -> torch.Tensor:
        """The weight as an ordinary contiguous tensor: computed in float32 and rounded once."""
        *lead, outputs, stored = self.codes.shape
        inputs = stored * self.form.per_byte
        sizes = (inputs, outputs) if self.transposed else (outputs, inputs)
        if self.is_meta:
            return torch.empty((*lead, *sizes), dtype=self.dtype, device="meta")
        dense = torch.empty((*lead, *sizes), dtype=self.dtype)
        kernel = kernel_function("pagoda_unpack_stored") if self.dtype in FLOAT_CODES and dense.numel() else None
        for place in itertools.product(*map(range, lead)):
            whole = dense[place].mT if self.transposed else dense[place]
            codes, scales = self.codes[place], self.scales[place]
            zeros = None if self.zeros is None else self.zeros[place]
            if kernel is None:
                _unpack(whole, self.form, codes, scales, zeros, self.order)
            else:
                run_stored_kernel(kernel, whole, self.form, codes, scales, zeros, self.order)
        return dense

    def replaced(self, **parts: Any) -> StoredWeight:
        """The same with other parts, dtype or transposition."""
        given = {
            "form": self.form,
            "codes": self.codes,
            "scales": self.scales,
            "zeros": self.zeros,
            "order": self.order,
            "dtype": self.dtype,
            "transposed": self.transposed,
            "input_scale": self.input_scale,
        }
        return type(self)(**{**given, **parts})

    def each(self, move: Callable[[torch.Tensor], torch.Tensor], **parts: Any) -> StoredWeight:
        """The same with codes, scales and zeros moved alike, in dims before their last."""
        zeros = None if self.zeros is None else move(self.zeros)
        return self.replaced(codes=move(self.codes), scales=move(self.scales), zeros=zeros, **parts)

    @property
    def stored_as(self) -> tuple[WeightFormat, torch.dtype, bool, bytes, InputScale | None]:
        """What weights must have in common to be the rows of one."""
        order = b"" if self.order is None else self.order.numpy().tobytes()
        return self.form, self.dtype, self.transposed, order, self.input_scale

    @property
    def stored_bytes(self) -> int:
        """Bytes of its parts."""
        return sum(part.numel() * part.element_size() for part in stored_parts(self))

    def release(self) -> None:
        """Free the parts: the weight is used no more."""
        self.codes, self.scales = self.codes.new_empty(0), self.scales.new_empty(0)
        self.zeros = self.order = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        moved = _MOVES.get(func)
        if moved is not None:
            found = moved(*args, **kwargs)
            if found is not None:
                return found
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            written = [value for value in args if isinstance(value, StoredWeight)]
            if written and args[0] is written[0]:
                raise RuntimeError(
                    f"{func} writes into a weight stored as {written[0].form}; load the model unquantized"
                )
        return func(*pytree.tree_map(as_dense, args), **pytree.tree_map(as_dense, kwargs))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredWeight({self.form}, {list(self.shape)}, {self.dtype})"


def run_stored_kernel(
    kernel: Callable[[bytes], int],
    out: torch.Tensor,
    form: WeightFormat,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None = None,
    packed_bits: int = 0,
) -> None:
    """Call a kernel of csrc/stored_weight.cpp for one matrix.

    Args:
        kernel: the C function.
        out: ``[out, in]`` of any strides, or 1-d bytes of panels.
        form, codes, scales, zeros, order: as in :class:`StoredWeight`.
        packed_bits: of a code in panels.
    """
    parts = [part if part is None or part.stride(-1) == 1 else part.contiguous() for part in (codes, scales, zeros)]
    pointers = [0 if part is None else part.data_ptr() for part in (*parts, order, out)]
    strides = [0 if part is None else part.stride(0) for part in parts]
    columns = (FLOAT_CODES[out.dtype], out.stride(1), out.stride(0)) if out.dim() == 2 else (0, 0, 0)
    format_fields = CODES.index(form.code), form.bits, form.group_size, FLOAT_CODES[SCALE_DTYPES[form.scale]]
    outputs, inputs = codes.shape[0], codes.shape[1] * form.per_byte
    threads = torch.get_num_threads()
    kernel(_ARGUMENTS.pack(*pointers, inputs, outputs, *strides, *format_fields, packed_bits, *columns, threads))


def _unpack(
    out: torch.Tensor,
    form: WeightFormat,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None,
) -> None:
    """The kernel's work in torch: some rows at a time, so that intermediate results stay in the processor's cache."""
    rows = max(1, _MOST_AT_ONCE // max(out.shape[1], 1))
    columns = slice(None) if order is None else order.long()
    for first in range(0, len(out), rows):
        at = slice(first, first + rows)
        values = _meant(form, codes[at], scales[at], None if zeros is None else zeros[at])
        out[at, columns] = values.to(out.dtype)


def _meant(form: WeightFormat, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """What rows of codes mean, float32 ``[rows, in]``."""
    values = values_of(codes, form)
    inputs = values.shape[-1]
    size = form.group_size or inputs
    whole = inputs // size * size if size else 0
    center = 1 << (form.bits - 1) if zeros is None else zeros.float()[..., None]
    for part, at in ((values[:, :whole], slice(whole // max(size, 1))), (values[:, whole:], slice(-1, None))):
        if part.shape[-1]:
            groups = part.unflatten(-1, (-1, min(size, part.shape[-1])))
            if form.code == "int":
                groups -= center if isinstance(center, int) else center[:, at]
            groups *= scales[:, at].float()[..., None]
            if form.code == "affine":
                groups -= center[:, at]  # type: ignore[index]
    return values


def stored_parts(weight: StoredWeight) -> list[torch.Tensor]:
    """The tensors that a weight is stored in."""
    return [part for part in (weight.codes, weight.scales, weight.zeros, weight.order) if part is not None]


def as_dense(value: Any) -> Any:
    """A stored weight as an ordinary tensor; anything else as it is."""
    return value.dense() if isinstance(value, StoredWeight) else value


def check_parts(
    form: WeightFormat,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None,
) -> None:
    """Refuse parts that are not a weight of a format.

    Raises:
        ValueError: it names the part, what it is and what it should be.
    """
    if codes.dtype is not torch.uint8 or codes.dim() < 2:
        raise ValueError(f"codes are {codes.dtype} {list(codes.shape)}; a matrix of uint8 is needed")
    inputs = codes.shape[-1] * form.per_byte
    heads = [*codes.shape[:-1], form.num_groups(inputs)]
    if list(scales.shape) != heads or scales.dtype is not SCALE_DTYPES[form.scale]:
        raise ValueError(
            f"scales are {scales.dtype} {list(scales.shape)}; {form} of [{codes.shape[-2]}, {inputs}] needs "
            f"{SCALE_DTYPES[form.scale]} {heads}"
        )
    if (zeros is not None) != (form.zero_dtype is not None) or (order is not None) != form.ordered:
        raise ValueError(f"zeros and order do not fit {form}")
    if zeros is not None and (list(zeros.shape) != heads or zeros.dtype is not form.zero_dtype):
        raise ValueError(f"zeros are {zeros.dtype} {list(zeros.shape)}; {form} needs {form.zero_dtype} {heads}")
    if order is not None and (list(order.shape) != [inputs] or order.dtype is not torch.int32):
        raise ValueError(f"order is {order.dtype} {list(order.shape)}; torch.int32 [{inputs}] is needed")


# What keeps a weight stored. Each returns None where it cannot.


def _same(x: StoredWeight, *_: Any, **__: Any) -> StoredWeight:
    return x.replaced()


def _clone(x: StoredWeight, **_: Any) -> StoredWeight:
    return x.each(torch.clone)


def _to_copy(x: StoredWeight, *, dtype: torch.dtype | None = None, **more: Any) -> StoredWeight | None:
    if dtype is not None and not dtype.is_floating_point:
        return None
    device, layout = more.get("device"), more.get("layout")
    if (device is not None and torch.device(device).type != "cpu") or layout not in (None, torch.strided):
        return None
    return x.replaced(dtype=x.dtype if dtype is None else dtype)


def _transpose(x: StoredWeight, first: int, second: int) -> StoredWeight | None:
    if {first % x.dim(), second % x.dim()} != {x.dim() - 1, x.dim() - 2}:
        return None
    return x.replaced(transposed=not x.transposed)


def _along(x: StoredWeight, dim: int) -> int | None:
    """The dim of codes and scales that is the weight's ``dim``; None for the inputs."""
    dim %= x.dim()
    if x.transposed and dim >= x.dim() - 2:
        dim = 2 * x.dim() - 3 - dim
    return None if dim == x.dim() - 1 else dim


def _slice(x: StoredWeight, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> StoredWeight | None:
    at = _along(x, dim)
    if at is None:
        whole = start in (None, 0) and (end is None or end >= x.shape[dim]) and step == 1
        return x.replaced() if whole else None
    return x.each(lambda part: _aten.slice.Tensor(part, at, start, end, step))


def _select(x: StoredWeight, dim: int, index: int) -> StoredWeight | None:
    at = _along(x, dim)
    if at is None or at >= x.dim() - 2:
        return None
    return x.each(lambda part: part.select(at, index))


def _unbind(x: StoredWeight, dim: int = 0) -> list[StoredWeight | None] | None:
    return [_select(x, 0, i) for i in range(x.shape[0])] if dim == 0 and x.dim() > 2 else None


def _split(x: StoredWeight, sizes: Any, dim: int = 0) -> list[StoredWeight] | None:
    at = _along(x, dim)
    if at is None:
        return None
    lengths = [sizes] * (x.shape[dim] // sizes) if isinstance(sizes, int) else list(sizes)
    if sum(lengths) != x.shape[dim]:
        return None
    pieces, begin = [], 0
    for length in lengths:
        pieces.append(x.each(functools.partial(torch.narrow, dim=at, start=begin, length=length)))
        begin += length
    return pieces


def _joined(parts: Sequence[Any], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> StoredWeight | None:
    first = parts[0]
    if not all(isinstance(part, StoredWeight) and part.stored_as == first.stored_as for part in parts):
        return None
    zeros = None if first.zeros is None else join([part.zeros for part in parts])
    return first.replaced(  # type: ignore[no-any-return]
        codes=join([part.codes for part in parts]), scales=join([part.scales for part in parts]), zeros=zeros
    )


def _cat(parts: Sequence[Any], dim: int = 0) -> StoredWeight | None:
    first = parts[0]
    at = _along(first, dim) if isinstance(first, StoredWeight) else None
    return None if at is None else _joined(parts, lambda tensors: torch.cat(tensors, at))


def _stack(parts: Sequence[Any], dim: int = 0) -> StoredWeight | None:
    return _joined(parts, torch.stack) if dim == 0 else None


def _unsqueeze(x: StoredWeight, dim: int) -> StoredWeight | None:
    return x.each(lambda part: part.unsqueeze(0)) if dim == 0 else None


def _t(x: StoredWeight) -> StoredWeight | None:
    return _transpose(x, 0, 1) if x.dim() == 2 else None


def _mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    return _product(x, weight, lambda rows, at: torch.mm(x, rows.t()))


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    if type(bias) not in _PLAIN or bias.shape != weight.shape[1:]:
        return None
    return _product(x, weight, lambda rows, at: torch.addmm(bias[at], x, rows.t()))


def _product(
    x: torch.Tensor, weight: torch.Tensor, multiply: Callable[[torch.Tensor, slice], torch.Tensor]
) -> torch.Tensor | None:
    """The product with a transposed weight, whose rows are unpacked some at a time; None for other operands. Memory
    for all of a large one would go back to the system behind it, which clears it for the next."""
    if type(x) not in _PLAIN or not isinstance(weight, StoredWeight) or not weight.transposed:
        return None
    rows = weight.replaced(transposed=False)
    count = max(1, _BYTES_AT_ONCE // (rows.shape[1] * rows.element_size()))
    at = [slice(first, first + count) for first in range(0, len(rows), count)]
    return torch.cat([multiply(as_dense(rows[part]), part) for part in at], -1)


_MOVES: dict[Any, Callable[..., Any]] = {
    _aten.t.default: _t,
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.transpose.int: _transpose,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.unbind.int: _unbind,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.unsqueeze.default: _unsqueeze,
}
