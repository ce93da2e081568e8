"""Traces modules with a recurrence in a loop as operators with state.

A loop over blocks of tokens would be unrolled for the traced number of tokens, and the graph would be wrong for more.
Without a kernel function (see ``kernel_functions``), the module's whole forward is replaced during capture. First,
the original forward is compared with the replacement: over the module's own buffers, with random numbers as outputs
of its projections, at lengths within a block and beyond two. A modified module, or one with other buffers, is
rejected.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...passes import UnsupportedModel
from ...runtime.ops.state.linear_recurrence import linear_recurrence_seq
from ..report import first_line

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Of the comparison, beside the standard deviation of what the module yields."""
_TOLERANCE_OF_HALVES = 6e-2
"""Where the module's buffers are rounded to half precision, one by one."""
_PROBE_DIM = 8
"""Channels of a head in the comparison."""
_FORWARD = "forward"
_lock = threading.RLock()


@dataclass(frozen=True)
class RecurrentModule:
    """What stands for the forward of a module while a model is traced.

    Attributes:
        parameters: names of the parameters of its forward, in order, without ``self`` and ``**kwargs``.
        attributes: that it has to have.
        traced: the function traced instead of its forward.
        probe: a copy of it over the same buffers, whose projections yield random numbers for so many tokens.
        lengths: numbers of tokens to compare it at.
    """

    parameters: tuple[str, ...]
    attributes: tuple[str, ...]
    traced: Callable[..., Any]
    probe: Callable[[nn.Module, int], nn.Module]
    lengths: Callable[[nn.Module], tuple[int, ...]]


def has_recurrent_modules(model_class: type) -> bool:
    """True if the Python module of a class has modules whose recurrence can be traced."""
    place = sys.modules.get(model_class.__module__)
    found = vars(place).values() if place is not None else ()
    return any(isinstance(x, type) and issubclass(x, nn.Module) and _counterpart(x) is not None for x in found)


def check_recurrent_modules(model: nn.Module) -> None:
    """Compare each recurrent module of a model with the function traced instead of its forward.

    Args:
        model: modules on the meta device, which have no numbers, are not run.

    Raises:
        UnsupportedModel: one has other parameters or attributes than are known here, or yields other numbers.
    """
    for name, module in model.named_modules():
        known = _counterpart(type(module))
        if known is None:
            continue
        _check_form(known, module)
        if any(buffer.is_meta for buffer in module.buffers()):
            continue
        if reason := _difference(known, module):
            raise UnsupportedModel(
                f"{name} ({type(module).__name__}) does not compute what its class says: {reason}; use a tested "
                "version of transformers, and a checkpoint whose buffers match its configuration"
            )


@contextmanager
def operators_in_place_of_loops(model: nn.Module) -> Iterator[None]:
    """Make the recurrent modules of a model run operators instead of loops.

    Raises:
        UnsupportedModel: see :func:`check_recurrent_modules`.
    """
    with _lock:
        check_recurrent_modules(model)
        found = {type(module) for module in model.modules()}
        placed = {cls: known.traced for cls in found if (known := _counterpart(cls)) is not None}
        before = {cls: cls.__dict__.get(_FORWARD) for cls in placed}
        try:
            for cls, traced in placed.items():
                setattr(cls, _FORWARD, traced)
            yield
        finally:
            for cls, forward in before.items():
                if forward is None:  # it has the forward of a class that it derives from
                    delattr(cls, _FORWARD)
                else:
                    setattr(cls, _FORWARD, forward)


def _counterpart(cls: type) -> RecurrentModule | None:
    return next((known for ending, known in _BY_ENDING.items() if cls.__name__.endswith(ending)), None)


def _check_form(known: RecurrentModule, module: nn.Module) -> None:
    cls = type(module)
    named = [p.name for p in inspect.signature(cls.forward).parameters.values() if p.kind is not p.VAR_KEYWORD][1:]
    if tuple(named) != known.parameters:
        raise UnsupportedModel(
            f"{cls.__name__} in {cls.__module__} takes ({', '.join(named)}), not ({', '.join(known.parameters)}); "
            "use a tested version of transformers"
        )
    missing = [name for name in known.attributes if not hasattr(module, name)]
    if missing:
        raise UnsupportedModel(
            f"{cls.__name__} in {cls.__module__} has no {missing[0]}; use a tested version of transformers"
        )


def _difference(known: RecurrentModule, module: nn.Module) -> str:
    """The way in which a module differs from what is traced in its place; "" if it does not."""
    dtype = next(buffer.dtype for buffer in module.buffers())
    tolerance = _TOLERANCE.get(dtype, _TOLERANCE_OF_HALVES)
    for length in known.lengths(module):
        with torch.no_grad():
            probe = known.probe(module, length)
            hidden = torch.zeros(1, length, 1, device=next(module.buffers()).device)
            arguments = {name: None for name in known.parameters} | {known.parameters[0]: hidden}
            try:
                expected = _first(type(module).forward(probe, **arguments))
            except Exception as error:
                return f"it fails at {length} tokens: {first_line(error)}"
            got = _first(known.traced(probe, **arguments))
        if got.shape != expected.shape or got.dtype is not expected.dtype:
            return (
                f"at {length} tokens it returns {tuple(expected.shape)} {expected.dtype}, "
                f"not {tuple(got.shape)} {got.dtype}"
            )
        distance = float((got.double() - expected.double()).abs().max() / expected.double().std())
        if not distance <= tolerance:
            return f"at {length} tokens it differs by {distance:.3g} standard deviations"
    return ""


def _first(result: Any) -> torch.Tensor:
    tensor: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


class _Given(nn.Module):
    """A stand-in that yields one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.tensor


def _copy_with(module: nn.Module, modules: Mapping[str, nn.Module], attributes: Mapping[str, Any]) -> nn.Module:
    """A copy over the same buffers, in float32 at least, with other modules and attributes."""
    probe = type(module).__new__(type(module))
    probe.__dict__.update(module.__dict__)
    wide = {
        name: None if buffer is None else buffer.to(torch.promote_types(buffer.dtype, torch.float32))
        for name, buffer in module._buffers.items()
    }
    probe.__dict__.update(_modules={**module._modules, **modules}, _buffers=wide, **attributes)
    return probe


def _lightning_attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention without softmax whose scores decay with the distance, by one rate for each head: ``S = exp(-slope) S
    + v kᵀ``, ``o = S q`` (lightning attention, Qin et al. 2024)."""
    for name, given in (("attention_mask", attention_mask), ("past_key_values", past_key_values)):
        if given is not None:
            raise NotImplementedError(f"{type(self).__name__} with {name} is not supported in a flat step")
    batch, tokens = hidden_states.shape[:2]
    heads, dim = self.num_attention_heads, self.head_dim
    joined = self.act_fn(self.qkv_proj(hidden_states)).reshape(batch, tokens, heads, 3 * dim)
    query, key, value = torch.split(joined, dim, dim=3)
    log_decay = -self.slope_rate.reshape(heads)
    output = linear_recurrence_seq(query, key, value, log_decay, None, 1.0, None)
    output = self.norm(output.reshape(batch, tokens, heads * dim))
    return self.out_proj(F.sigmoid(self.output_gate(hidden_states)) * output), None


def _lightning_probe(module: Any, length: int) -> nn.Module:
    generator = torch.Generator().manual_seed(length)
    heads, device = module.num_attention_heads, module.slope_rate.device
    dtype = torch.promote_types(module.slope_rate.dtype, torch.float32)

    def random(*shape: int) -> nn.Module:
        return _Given(torch.randn(shape, generator=generator).to(device, dtype))

    modules = {
        "qkv_proj": random(1, length, heads * 3 * _PROBE_DIM),
        "output_gate": random(1, length, heads * _PROBE_DIM),
        "norm": nn.Identity(),
        "out_proj": nn.Identity(),
    }
    return _copy_with(module, modules, {"head_dim": _PROBE_DIM})


def _lightning_lengths(module: Any) -> tuple[int, ...]:
    """Within a block, which is 256 tokens long as a rule, and beyond one and two."""
    return 7, 65, module.block_size + 44, 2 * module.block_size + 1


_BY_ENDING: Mapping[str, RecurrentModule] = {
    "LightningAttention": RecurrentModule(
        ("hidden_states", "position_embeddings", "attention_mask", "past_key_values"),
        (
            *("head_dim", "num_attention_heads", "block_size", "slope_rate"),
            *("act_fn", "qkv_proj", "norm", "output_gate", "out_proj"),
        ),
        _lightning_attention,
        _lightning_probe,
        _lightning_lengths,
    ),
}
"""By what the names of classes end in, which transformers prefixes with the model's."""
