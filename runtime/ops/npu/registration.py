"""Gives `npu::` operators their CPU kernels and, where torch_npu is absent, their schemas and fakes too."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .limits import violations
from .limits.call import Call
from .schemas import COMMON_NAMES, SCHEMAS

_NAMESPACE = "npu"
_log = logging.getLogger(__name__)
# Libraries live as long as this module: one that is collected takes its registrations with it.
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")
_registered: set[str] = set()


@dataclass(frozen=True)
class Operator:
    """CPU semantics of one `npu::` operator.

    Kernel and fake name the arguments that they read, as the schema or ``COMMON_NAMES`` does, and get its defaults.
    An argument that is not read keeps its default: other values are refused with ``NotImplementedError``, and what
    the operator's limits forbid with ``ValueError``.

    Attributes:
        name: operator name without the namespace.
        kernel: what runs for CPU tensors. It returns fresh tensors, and writes to an argument only where the schema
            says ``(a!)``.
        fake: shapes, dtypes and strides of the results. It may read what the kernel refuses.
        functional: for an operator with ``(a!)`` arguments, the operator that returns their new values instead,
            after the other results. Its kernel and fake are derived from the two above.
        takes: argument → the values that the kernel knows, whether it reads them or not.
        ignores: arguments that may have any value, and change nothing here.
        lacks: tensor argument → dtypes that the documents have for it, and the kernel has not.
        record: a dataclass that takes the arguments of the kernel, which then takes this; ``names`` becomes what the
            schema calls those that have a common name.
    """

    name: str
    kernel: Callable[..., Any]
    fake: Callable[..., Any]
    functional: str | None = None
    takes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ignores: Sequence[str] = ()
    lacks: Mapping[str, Sequence[torch.dtype]] = field(default_factory=dict)
    record: type | None = None


def register(operators: Iterable[Operator]) -> None:
    """Register CPU kernels for ``operators``, once; define what torch_npu has not defined.

    torch_npu, if it can be imported, is imported here first: it aborts the process when it finds one of its
    operators defined by somebody else. With it, only CPU kernels are added, and fakes where it has none. Without
    it, the operator is defined from its vendor schema, and an in-place operator is functionalized as torch_npu does
    it: ahead-of-time tracing emits the ``functional`` operator and a ``copy_``.
    """
    import_torch_npu()
    schemas = {schema[: schema.index("(")]: schema for schema in SCHEMAS}
    for operator in operators:
        if operator.name in _registered:
            continue
        _registered.add(operator.name)
        defined = _define(schemas[operator.name])
        overload = _overload(operator.name)
        kernel, fake = (by_schema(operator, each, overload._schema) for each in (operator.kernel, operator.fake))
        _attach(operator.name, kernel, fake)
        if operator.functional is None:
            continue
        twin_defined = _define(schemas[operator.functional])
        written = _written_arguments(overload)
        _attach(
            operator.functional,
            _out_of_place_kernel(kernel, written),
            _out_of_place_fake(fake, written),
        )
        if defined and twin_defined:
            _functionalise(overload, _overload(operator.functional), written)


def by_schema(operator: Operator, function: Callable[..., Any], schema: torch.FunctionSchema) -> Callable[..., Any]:
    """The kernel or the fake of ``operator`` as torch calls it, with all arguments of the schema or some."""
    common = COMMON_NAMES.get(operator.name, {})
    own_names = {known: name for name, known in common.items()}
    of_kernel = _parameters(operator.record or operator.kernel)
    is_kernel = function is operator.kernel
    reads = of_kernel if is_kernel else _parameters(function)
    names = {argument.name: common.get(argument.name, argument.name) for argument in schema.arguments}
    defaults = {
        argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()
    }
    takes = {}
    for name, known in names.items():
        if name in operator.ignores or (known in reads and known not in of_kernel):
            continue  # what the fake alone reads is the fake's to judge
        if name in operator.takes or known not in of_kernel:
            takes[name] = operator.takes.get(name, (defaults.get(name),))

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        for name, values in takes.items():
            value = given[name]
            if isinstance(value, torch.Tensor) or value not in values:
                shown = f"{name}={value!r}" if isinstance(value, int | float | str) else name
                raise NotImplementedError(
                    f"the CPU kernel of npu::{operator.name} does not implement {shown}; it takes "
                    f"{' or '.join(map(repr, values))}"
                )
        arguments = {known: given[name] for name, known in names.items()}
        if is_kernel:
            _refuse(operator, Call(operator.name, arguments, is_reference=True))
        read = {known: value for known, value in arguments.items() if known in reads}
        if is_kernel and operator.record is not None:
            return function(operator.record(names=own_names, **read))
        return function(**read)

    return run


def _refuse(operator: Operator, call: Call) -> None:
    """Raise for what the kernel does not implement, and for what the documents forbid."""
    for name, dtypes in operator.lacks.items():
        tensor = call.tensor(name)
        if tensor is not None and tensor.dtype in dtypes:
            raise NotImplementedError(f"the CPU kernel of npu::{operator.name} takes no {name} of {tensor.dtype}")
    if reasons := violations(call):
        raise ValueError(f"npu::{operator.name}: {'; '.join(reasons)}")


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def import_torch_npu() -> bool:
    """Import torch_npu if it is installed and CANN lets it load; return whether it is there."""
    if "torch_npu" in sys.modules:
        return True
    if importlib.util.find_spec("torch_npu") is None:
        return False
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        # Without CANN the shared objects do not load, and torch_npu has registered nothing.
        _log.info("torch_npu is installed but does not import (%s); its operators are defined here", error)
        return False
    return True


def _define(schema: str) -> bool:
    """Define ``npu::<schema>`` unless something else has; return whether it was defined here."""
    name = schema[: schema.index("(")]
    if hasattr(getattr(torch.ops, _NAMESPACE), name):
        return False
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    return True


def _overload(name: str) -> torch._ops.OpOverload:
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return overload


def _attach(name: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    qualified = f"{_NAMESPACE}::{name}"
    _library.impl(name, kernel, "CPU")
    if not torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "Meta"):
        torch.library.register_fake(qualified, fake, lib=_library)


@dataclass(frozen=True)
class _Written:
    """Arguments that an operator writes to, and those of its results that are such arguments themselves."""

    arguments: tuple[int, ...]
    aliased_results: tuple[int, ...]

    def other_results(self, returned: Any) -> tuple[Any, ...]:
        results = () if returned is None else returned if isinstance(returned, tuple | list) else (returned,)
        return tuple(result for index, result in enumerate(results) if index not in self.aliased_results)


def _written_arguments(overload: torch._ops.OpOverload) -> _Written:
    schema = overload._schema
    return _Written(
        tuple(i for i, argument in enumerate(schema.arguments) if argument.is_write),
        tuple(i for i, result in enumerate(schema.returns) if result.alias_info is not None),
    )


def _unpacked(results: tuple[Any, ...]) -> Any:
    return results[0] if len(results) == 1 else results


def _out_of_place_kernel(kernel: Callable[..., Any], written: _Written) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        copied = [arg.clone() if i in written.arguments else arg for i, arg in enumerate(args)]
        results = written.other_results(kernel(*copied, **kwargs))
        return _unpacked((*results, *(copied[i] for i in written.arguments)))

    return run


def _out_of_place_fake(fake: Callable[..., Any], written: _Written) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        results = written.other_results(fake(*args, **kwargs))
        return _unpacked((*results, *(torch.empty_like(args[i]) for i in written.arguments)))

    return run


def _functionalise(in_place: torch._ops.OpOverload, functional: torch._ops.OpOverload, written: _Written) -> None:
    @in_place.py_functionalize_impl
    def run(context: Any, *args: Any, **kwargs: Any) -> Any:
        with context.redispatch_to_next():
            returned = functional(*context.unwrap_tensors(args), **context.unwrap_tensors(kwargs))
        results = returned if isinstance(returned, tuple | list) else (returned,)
        split = len(results) - len(written.arguments)
        for index, value in zip(written.arguments, results[split:], strict=True):
            context.replace(args[index], value)
            context.commit_update(args[index])
            context.sync(args[index])
        if written.aliased_results:
            return args[written.arguments[0]]
        return context.wrap_tensors(_unpacked(tuple(results[:split]))) if split else None
