"""Converts torchair's GE graph, a protobuf message, to plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from .ge_graph import SCHEDULING, GeGraph, GeNode

# Constants with more elements are described by shape and dtype alone.
_SHOWN_ELEMENTS = 64
# How a list says of what it is (AttrDef.ListValue.ListValueType).
_LIST_FIELDS = {1: "s", 2: "i", 3: "f", 4: "b", 9: "dt"}
_DTYPES = {
    "DT_FLOAT": torch.float32,
    "DT_FLOAT16": torch.float16,
    "DT_BF16": torch.bfloat16,
    "DT_DOUBLE": torch.float64,
    "DT_INT8": torch.int8,
    "DT_UINT8": torch.uint8,
    "DT_INT16": torch.int16,
    "DT_INT32": torch.int32,
    "DT_INT64": torch.int64,
    "DT_BOOL": torch.bool,
}


# What sizes are computed with. Anything else that is made from sizes alone is a tensor of that size.
_SIZE_ARITHMETIC = frozenset(
    {
        "Add",
        "Cast",
        "ConcatD",
        "ConcatV2",
        "Div",
        "FloorDiv",
        "FloorMod",
        "Gather",
        "GatherV2",
        "Maximum",
        "Minimum",
        "Mod",
        "Mul",
        "Neg",
        "Pack",
        "Pow",
        "RealDiv",
        "ReduceProd",
        "Slice",
        "StridedSlice",
        "Sub",
    }
)


def read_graph(
    concrete: Any,
    names: Sequence[str | tuple[str, int]],
    origins: Mapping[str, str],
    defaults: Mapping[str, Mapping[str, Any]],
) -> GeGraph:
    """Torchair's graph as plain data.

    Args:
        concrete: a ``GeConcreteGraph`` whose passes have run.
        names: the name of each input of the converted graph, (list's name, index in it) for members of lists.
        origins: name of a GE node → name of the converted node.
        defaults: operator → attributes that its nodes have by default, in torchair's form.
    """
    known = {type: _default_attributes(attributes) for type, attributes in defaults.items()}
    called = _input_names(concrete, names)
    on_host = {op.name for op in concrete.graph.op if op.type == "Data" and _is_host_input(concrete, op)}
    nodes = [_read_node(op, called, origins, op.name in on_host, known.get(op.type, {})) for op in concrete.graph.op]
    end = next(node for node in nodes if node.type == "NetOutput")
    written = set(concrete._graph_output_ref_input)
    outputs = tuple(source for i, source in enumerate(end.inputs.values()) if i not in written)
    data = sorted((node for node in nodes if node.type == "Data"), key=lambda node: node.attributes["index"])
    return GeGraph(_mark_host(nodes), tuple(node.name for node in data), outputs)


def _input_names(concrete: Any, names: Sequence[str | tuple[str, int]]) -> dict[str, str]:
    """Name of each ``Data`` node → name of its input."""
    from torchair.ge._ge_graph import _SymPackInput

    if len(concrete._fx_input_names) != len(names):
        raise RuntimeError(
            f"AOTAutograd made {len(concrete._fx_input_names)} inputs of {len(names)}: some of them share memory"
        )
    place = {name: i for i, name in enumerate(concrete._fx_input_names)}
    called = {}
    for op in concrete.graph.op:
        if op.type != "Data":
            continue
        function = concrete._input_info_list[op.attr["index"].i].func
        if isinstance(function, _SymPackInput):
            called[op.name] = _list_name([names[i] for i in function.fx_input_idx_list])
        else:
            called[op.name] = _list_name([names[place[op.name]]])
    return called


def _list_name(members: Sequence[str | tuple[str, int]]) -> str:
    """``kv_lens[0:4]`` for the first four members of a list."""
    first = members[0]
    if isinstance(first, str):
        return ", ".join(str(member) for member in members)
    name, start = first
    if list(members) == [(name, start + i) for i in range(len(members))]:
        return f"{name}[{start}:{start + len(members)}]" if len(members) > 1 else f"{name}[{start}]"
    return ", ".join(f"{member[0]}[{member[1]}]" for member in members)


def _is_host_input(concrete: Any, op: Any) -> bool:
    """True if a ``Data`` is an integer or a list of integers. (On this machine all tensors are on the host too.)"""
    from torchair.ge._ge_graph import _SymPackInput, _ValueInput

    return isinstance(concrete._input_info_list[op.attr["index"].i].func, _SymPackInput | _ValueInput)


def _read_node(
    op: Any, called: Mapping[str, str], origins: Mapping[str, str], host: bool, defaults: Mapping[str, Any]
) -> GeNode:
    from torchair._ge_concrete_graph.graph_pass import _get_output_to_input_ref_idx

    feeds = [name for name in op.input if not name.endswith(":-1")]
    inputs = {
        description.name or f"input{i}": _renamed(source, called)
        for i, (source, description) in enumerate(zip(feeds, op.input_desc, strict=False))
        if source
    }
    named = {name: _value(attr) for name, attr in op.attr.items() if not name.startswith("_")}
    attributes = dict(sorted({**defaults, **named}.items()))
    if op.type in ("Data", "Const"):
        description = op.output_desc[0]
        attributes["shape"] = list(description.shape.dim)
        attributes["dtype"] = _dtype_name(description.dtype)
    if op.type == "Const":
        attributes.pop("value", None)
        attributes.update(_constant(op))
    in_place = {str(out): op.input_desc[into].name for out, into in _get_output_to_input_ref_idx(op).items()}
    after = tuple(_renamed(name, called).rpartition(":")[0] for name in op.input if name.endswith(":-1"))
    name, origin = called.get(op.name, op.name), origins.get(op.name, "")
    schedule = {key: _value(op.attr[key]) for key in SCHEDULING if key in op.attr}
    return GeNode(name, op.type, inputs, attributes, origin, host, after, in_place, schedule)


def _renamed(source: str, called: Mapping[str, str]) -> str:
    name, _, index = source.rpartition(":")
    return f"{called.get(name, name)}:{index}"


def _dtype_name(dtype: int) -> str:
    from torchair._ge_concrete_graph.ge_ir_pb2 import DataType

    name = DataType.Name(dtype)
    return str(_DTYPES[name]).removeprefix("torch.") if name in _DTYPES else name


def _constant(op: Any) -> dict[str, Any]:
    from torchair._ge_concrete_graph.ge_ir_pb2 import DataType

    tensor = op.attr["value"].t
    shape = list(tensor.desc.shape.dim)
    dtype = _DTYPES.get(DataType.Name(tensor.desc.dtype))
    elements = 1
    for size in shape:
        elements *= size
    if dtype is None or not 0 < elements <= _SHOWN_ELEMENTS:
        return {}
    values = torch.frombuffer(bytearray(tensor.data), dtype=dtype, count=elements)
    return {"value": values.reshape(shape).tolist()}


def _default_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    from torchair._ge_concrete_graph.ge_ir_pb2 import AttrDef

    values = {}
    for name, attribute in attributes.items():
        message = AttrDef()
        attribute.merge_to(message)
        values[name] = _value(message)
    return values


def _value(attr: Any) -> Any:
    """A GE attribute as a Python value."""
    kind = attr.WhichOneof("value")
    if kind == "s":
        return attr.s.decode("utf-8", "replace")
    if kind == "list":
        field = _LIST_FIELDS.get(attr.list.val_type) or next((f for f in "sifb" if getattr(attr.list, f)), "i")
        values = list(getattr(attr.list, field))
        if field == "s":
            return [v.decode("utf-8", "replace") for v in values]
        return [_short(v) for v in values] if field == "f" else values
    if kind == "list_list_int":
        return [list(inner.list_i) for inner in attr.list_list_int.list_list_i]
    if kind == "f":
        return _short(attr.f)
    if kind in ("i", "b", "dt"):
        return getattr(attr, kind)
    return None if kind is None else f"<{kind}>"


def _short(value: float) -> float:
    """The shortest number equal to ``value`` in single precision, which GE uses: 0.1, not 0.10000000149."""
    return float(str(np.float32(value)))


def _mark_host(nodes: Sequence[GeNode]) -> tuple[GeNode, ...]:
    """Mark nodes computed from shapes and integer inputs alone."""
    known = {node.name: node for node in nodes}
    state: dict[str, bool | None] = {}  # host, device, or None for a constant, which is either

    def where(name: str) -> bool | None:
        if name not in state:
            node = known[name]
            if node.type == "Const":
                state[name] = None
            elif node.type in ("Data", "Shape") or node.host:
                state[name] = node.host or node.type == "Shape"
            else:
                places = {where(source.rpartition(":")[0]) for source in node.inputs.values()}
                sizes = node.is_view or node.type in _SIZE_ARITHMETIC
                state[name] = None if places <= {None} else sizes and False not in places
        return state[name]

    return tuple(
        replace(node, host=True) if where(node.name) and node.type != "NetOutput" else node for node in nodes
    )
