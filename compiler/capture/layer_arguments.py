"""What a model's forward hands to its decoder layers, each argument by how it is computed.

Numbers would not tell: at the few tokens that a model is run with, a mask with a window is one without. So the model
is run once with its layers left out, and of each tensor is kept what computed it, from what. The layers' place is
taken by stubs that hand on what they are given.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ..fingerprint.fingerprint import describe
from ..fingerprint.tensor_contents import module_tensors
from .layer_kinds import PLACE
from .model_facts import configs, takes_positions
from .stored_parameters import placeholders_for_stored
from .trace import first_tokens, trace_length

_MOST_TOKENS = 256
"""Up to here masks of real numbers are small; beyond, they are computed without numbers."""
_RETURNS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda x: x,
    lambda x: (x,),
    lambda x: (x, None),
    lambda x: (x, None, None),
)
"""What layers return."""


class _Stop(Exception):
    """Raised where the last layer would run."""


class CannotRun(Exception):
    """The model does not run without its layers. The message says why."""


def layer_arguments(model: nn.Module, path: str, layers: Sequence[nn.Module]) -> list[str]:
    """A digest for each layer of what it is handed where a model is traced: of values by name, and of tensors by what
    computes them. What the layer before yielded does not count, nor what only says where the layer stands.

    Args:
        model: on the CPU.
        path: qualified name of the list of its layers.
        layers: all of them.

    Raises:
        CannotIdentify: an argument cannot be described.
        CannotRun: the model does not call each layer once, in order, or does something with their results that no
            stub stands.
    """
    reasons = []
    for returned in _RETURNS:
        try:
            arguments = _Run(model, path, layers, returned).arguments()
        except Exception as error:  # of the model's own code, which meets what it does not expect
            reasons.append(f"{type(error).__name__}: {error}".splitlines()[0])
        else:
            return [describe(given) for given in arguments]
    raise CannotRun("; ".join(dict.fromkeys(reasons)))


class _Run:
    """One run of a model with stubs that return ``returned(hidden states)``."""

    def __init__(
        self, model: nn.Module, path: str, layers: Sequence[nn.Module], returned: Callable[[torch.Tensor], Any]
    ) -> None:
        self.model, self.path, self.layers, self.returned = model, path, layers, returned
        self.found: list[dict[str, Any]] = []
        self.origins = _Origins()
        self.hidden: torch.Tensor | None = None

    def arguments(self) -> list[dict[str, Any]]:
        tokens = trace_length(self.model)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(placeholders_for_stored(self.model))
            stack.enter_context(self._stubs())
            self.origins.names = {id(tensor): name for name, tensor in module_tensors(self.model).items()}
            model = self.model
            if tokens > _MOST_TOKENS:
                model = self._copy()
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            ids, positions = first_tokens(tokens, torch.device("cpu"))
            stack.enter_context(self.origins)
            given = {"position_ids": positions} if takes_positions(model) else {}
            try:
                model(input_ids=ids, use_cache=False, return_dict=True, **given)
            except _Stop:
                return self.found
        raise CannotRun(f"it calls {len(self.found)} of {len(self.layers)} layers")

    def _copy(self) -> nn.Module:
        """The model around the same tensors and layers, in which tensors without numbers may stay behind."""
        shared = (*self.model.parameters(), *self.model.buffers(), *self.layers, *configs(self.model))
        return deepcopy(self.model, {id(item): item for item in shared})

    @contextmanager
    def _stubs(self) -> Iterator[None]:
        before = [vars(layer).get("forward") for layer in self.layers]
        try:
            for i, layer in enumerate(self.layers):
                vars(layer)["forward"] = self._stub(i, inspect.signature(layer.forward))
            yield
        finally:
            for layer, forward in zip(self.layers, before, strict=True):
                if forward is None:
                    vars(layer).pop("forward", None)
                else:
                    vars(layer)["forward"] = forward

    def _stub(self, index: int, signature: inspect.Signature) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if index != len(self.found):
                raise CannotRun(f"layer {index} is called behind {len(self.found)} layers")
            given = signature.bind(*args, **kwargs).arguments
            rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
            given.update(given.pop(rest, {}))
            given = {name: x for name, x in given.items() if not PLACE.fullmatch(name)}
            first = next(x for x in tree_leaves(given) if isinstance(x, torch.Tensor))
            if self.hidden is None:
                self.hidden = self.origins.start(first)
            elif (first.shape, first.dtype) != (self.hidden.shape, self.hidden.dtype):
                raise CannotRun(f"layer {index} is given {tuple(first.shape)}, not {tuple(self.hidden.shape)}")

            def said(x: torch.Tensor) -> str:
                return "hidden" if x is self.hidden or (index == 0 and x is first) else self._origin(x, index)

            self.found.append(tree_map_only(torch.Tensor, said, given))
            if len(self.found) == len(self.layers):
                raise _Stop
            return self.returned(self.hidden)

        return forward

    def _origin(self, x: torch.Tensor, index: int) -> str:
        """What computed a tensor; one of the layer's own by its name in the layer."""
        name = self.origins.names.get(id(x), "")
        own = f"{self.path}.{index}."
        return f"own {name.removeprefix(own)}" if name.startswith(own) else self.origins.of(x)


class _Origins(TorchDispatchMode):
    """Keeps of each tensor that is computed a digest of the calls that made it and wrote into it.

    Attributes:
        names: of the model's tensors, by ``id``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self._made: dict[int, tuple[torch.Tensor, str]] = {}  # with the tensor: while it is known by its id, it lives
        self._written: dict[int, str] = {}  # by storage

    def start(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor that stands for what a layer yields."""
        made = torch.zeros_like(like)
        self._made[id(made)] = made, "hidden"
        return made

    def of(self, x: torch.Tensor) -> str:
        """The digest of a tensor as it is now; a new one of one that comes from elsewhere, but for single numbers."""
        if id(x) not in self._made:
            self._made[id(x)] = x, self._unmade(x)
        return self._made[id(x)][1] + self._written.get(_storage(x), "")

    def _unmade(self, x: torch.Tensor) -> str:
        if id(x) in self.names:
            return self.names[id(x)]
        if type(x) is torch.Tensor and x.device.type == "cpu" and x.numel() == 1:
            with _disable_current_modes():
                return f"{x.dtype} {tuple(x.shape)} {x.item()!r}"
        return f"unknown {len(self._made)}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, form = tree_flatten((args, kwargs))
        said = [self.of(x) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
        call = hashlib.sha256("\0".join((str(func), str(form), *said)).encode()).hexdigest()
        result = func(*args, **kwargs)
        for i, parameter in enumerate(func._schema.arguments):
            if parameter.is_write:
                for x in tree_leaves(args[i] if i < len(args) else kwargs.get(parameter.name)):
                    if isinstance(x, torch.Tensor):
                        self._written[_storage(x)] = self._written.get(_storage(x), "") + call
        for i, x in enumerate(tree_leaves(result)):
            if isinstance(x, torch.Tensor) and id(x) not in self._made:
                self._made[id(x)] = x, f"{call}:{i}"
        return result


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata
