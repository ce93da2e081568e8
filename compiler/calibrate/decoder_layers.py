"""Runs a causal LM's decoder layers one at a time, with the hidden states kept in between.

Calibration needs the inputs of each linear layer after all layers before it are quantized. Running the whole model
for each layer would take time quadratic in its depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from ..capture.layer_kinds import find_decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class LayerCall:
    """One batch on its way through the layers.

    Attributes:
        hidden: ``[batch, tokens, width]``, what the next layer reads.
        others: of each layer, its further positional arguments and its keyword arguments, in the float model.
    """

    hidden: torch.Tensor
    others: list[tuple[tuple[Any, ...], dict[str, Any]]]

    def run(self, layer: nn.Module, index: int) -> torch.Tensor:
        """The output of a layer, ``[batch, tokens, width]``."""
        arguments, named = self.others[index]
        return _hidden_of(layer(self.hidden, *arguments, **named))


class _Enough(Exception):
    """A layer has got as far as was wanted."""


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, first to last.

    Raises:
        ValueError: there is no list of as many modules as the configuration names layers.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    _, layers = find_decoder_layers(model)
    if len(layers) != count:
        raise ValueError(
            f"model is a {type(model).__name__} without a list of its {count} decoder layers, which calibration "
            "needs; use it without calibration"
        )
    return list(layers)


def first_call(model: PreTrainedModel, layers: Sequence[nn.Module], ids: torch.Tensor) -> LayerCall:
    """Run the model on token ids, up to its last layer, and note what each layer gets.

    Args:
        model: as it is, not rounded.
        layers: its decoder layers.
        ids: ``[batch, tokens]`` int64.

    Raises:
        ValueError: a layer does not read what the one before it returned.
    """
    first: list[torch.Tensor] = []
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    last: list[torch.Tensor] = []

    def before(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        named = dict(named)
        hidden = arguments[0] if arguments else named.pop("hidden_states", None)
        if not isinstance(hidden, torch.Tensor) or (last and hidden is not last[0]):
            raise ValueError(
                f"model is a {type(model).__name__}, whose layer {len(others)} does not read the output of the "
                "previous one, so they cannot be calibrated one by one; use it without calibration"
            )
        if not first:
            first.append(hidden)
        others.append((arguments[1:], named))

    def after(layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if len(others) == len(layers):
            raise _Enough
        last[:] = [_hidden_of(output)]

    with ExitStack() as hooks:
        hooks.enter_context(suppress(_Enough))
        for layer in layers:
            hooks.enter_context(_removed(layer.register_forward_pre_hook(before, with_kwargs=True)))
            hooks.enter_context(_removed(layer.register_forward_hook(after)))
        model(input_ids=ids, use_cache=False)
    return LayerCall(first[0], others)


@dataclass(frozen=True)
class Matrix:
    """A module that multiplies by a matrix: ``nn.Linear``, or GPT-2's ``Conv1D``, which stores it transposed.

    Attributes:
        name: inside of its layer.
        module: the module.
    """

    name: str
    module: nn.Module

    @property
    def dtype(self) -> torch.dtype:
        """That its numbers are stored in."""
        return self._stored().dtype

    def read(self) -> torch.Tensor:
        """A copy, ``[out, in]`` float32."""
        weight = self._stored().detach()
        return (weight.t() if isinstance(self.module, Conv1D) else weight).to(torch.float32, copy=True)

    def write(self, matrix: torch.Tensor) -> None:
        """Store ``[out, in]`` numbers in the module's own dtype."""
        with torch.no_grad():
            self._stored().copy_(matrix.t() if isinstance(self.module, Conv1D) else matrix)

    def _stored(self) -> torch.Tensor:
        return self.module.get_parameter("weight")


def matrices_by_input(layer: nn.Module, index: int, call: LayerCall) -> list[list[Matrix]]:
    """The matrices that a layer multiplies by, in the order of their use; those that read the same input together.

    A module that is not called, or more than once, is left out.
    """
    used: list[tuple[Matrix, torch.Tensor]] = []
    with ExitStack() as hooks:
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear | Conv1D):
                matrix = Matrix(name, module)

                def before(_: nn.Module, arguments: tuple[Any, ...], matrix: Matrix = matrix) -> None:
                    used.append((matrix, arguments[0]))

                hooks.enter_context(_removed(module.register_forward_pre_hook(before)))
        call.run(layer, index)
    names = [matrix.name for matrix, _ in used]
    groups: list[tuple[list[Matrix], torch.Tensor]] = []
    for matrix, read in used:
        if names.count(matrix.name) > 1:
            continue
        if groups and groups[-1][1] is read:
            groups[-1][0].append(matrix)
        else:
            groups.append(([matrix], read))
    return [matrices for matrices, _ in groups]


def input_of(layer: nn.Module, index: int, call: LayerCall, name: str) -> torch.Tensor:
    """The input of the module of that name when the layer runs: ``[rows, in]`` float32; no rows where it is not
    called, as an expert that no token goes to."""
    found: list[torch.Tensor] = []

    def before(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        found.append(arguments[0])
        raise _Enough

    with _removed(layer.get_submodule(name).register_forward_pre_hook(before)), suppress(_Enough):
        call.run(layer, index)
    return found[0].flatten(0, -2).float() if found else torch.zeros(0, 1)


def _hidden_of(output: Any) -> torch.Tensor:
    hidden: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return hidden


@contextmanager
def _removed(handle: RemovableHandle) -> Iterator[None]:
    """Remove a hook in the end."""
    try:
        yield
    finally:
        handle.remove()
