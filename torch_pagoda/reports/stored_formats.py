"""The formats of a model's stored weights, to lower a model without values in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..compiler.capture.layer_kinds import find_decoder_layers
from ..compiler.costs.skeleton import Skeleton, build_skeleton
from ..runtime.ops.linear.stored_weight import StoredWeight
from ..runtime.ops.linear.weight_format import SCALE_DTYPES, InputScale, WeightFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Formats = Mapping[str, "list[Any]"]
"""Name of a parameter → its format, whether it is transposed, scale and offset of its inputs or None, and index of
its input order in the model, -1 for none. Ready for ``json.dump``."""


class _WithoutValues(StoredWeight):
    """One that nothing has written into: what it shows is not written either, so it costs no memory."""

    def dense(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def stored_formats(model: nn.Module) -> dict[str, list[Any]]:
    """The formats of the weights that a quantized checkpoint stores."""
    orders: dict[bytes, int] = {}
    found: dict[str, list[Any]] = {}
    for name, weight in model.named_parameters():
        if isinstance(weight, StoredWeight):
            order = -1 if weight.order is None else orders.setdefault(weight.order.numpy().tobytes(), len(orders))
            given = None if weight.input_scale is None else list(weight.input_scale)
            found[name] = [str(weight.form), weight.transposed, given, order]
    return found


def marks_of_layers(model: nn.Module, formats: Formats) -> list[str]:
    """Formats of the weights in each decoder layer; equal for layers that are lowered alike.

    Input scales count by which weights of a layer share them, by whether they have an offset, and by whether they are
    exact in bfloat16, which fused norms need.
    """
    path, layers = find_decoder_layers(model)
    marks: list[dict[str, Any]] = [{} for _ in layers]
    shared: list[dict[Any, int]] = [{} for _ in layers]
    for name, (form, transposed, given, order) in formats.items():
        number, _, rest = name.removeprefix(f"{path}.").partition(".")
        if not name.startswith(f"{path}.") or not number.isdecimal():
            continue
        known = shared[int(number)]
        same = [known.setdefault(key, len(known)) for key in ((given and tuple(given)), order)]
        marks[int(number)][rest] = (
            form,
            transposed,
            bool(given and given[1]),
            bool(given) and _is_bfloat16(given[0]),
            same,
        )
    return [repr(sorted(mark.items())) for mark in marks]


def _is_bfloat16(scale: float) -> bool:
    number = torch.tensor(scale)
    return bool(number.bfloat16().float() == number)


def store_as(model: nn.Module, formats: Formats) -> None:
    """Replace parameters of a model without values by stored ones; unknown names are ignored."""
    for name, (text, transposed, given, order) in formats.items():
        owner, _, leaf = name.rpartition(".")
        try:
            module = model.get_submodule(owner)
        except AttributeError:
            continue  # of a layer that another one stands for
        parameter = module._parameters.get(leaf)
        if parameter is not None:
            stored = _without_values(parameter, WeightFormat.parse(text), transposed, given, order)
            module._parameters[leaf] = nn.Parameter(stored, requires_grad=False)


def stored_skeleton(model: PreTrainedModel) -> Skeleton:
    """A few layers of a model with stored weights, in the same formats, without values."""
    formats = stored_formats(model)
    skeleton = build_skeleton(type(model), model.config, model.dtype, marks_of_layers(model, formats))
    store_as(skeleton.model, formats)
    return skeleton


def _without_values(
    parameter: torch.Tensor, form: WeightFormat, transposed: bool, given: list[Any] | None, order: int
) -> StoredWeight:
    """A weight with the shape and dtype of a parameter."""
    *lead, outputs, inputs = (parameter.mT if transposed else parameter).shape
    groups = form.num_groups(inputs)

    def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*lead, outputs, count, dtype=dtype, device=parameter.device)

    return _WithoutValues(
        form,
        empty(inputs // form.per_byte, torch.uint8),
        empty(groups, SCALE_DTYPES[form.scale]),
        None if form.zero_dtype is None else empty(groups, form.zero_dtype),
        None if order < 0 else torch.arange(inputs, dtype=torch.int32).roll(order),
        dtype=parameter.dtype,
        transposed=transposed,
        input_scale=None if given is None else InputScale(*given),
    )
