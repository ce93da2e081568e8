"""Names in code: globals and attributes, imported modules, and whether it computes names."""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections.abc import Iterator

UNTOLD = frozenset("globals eval exec locals __import__ open import_module environ environb getenv getenvb".split())
"""Names of what brings in things that code does not say: files, environment variables, computed names."""
_COMPUTED = frozenset(
    {"vars", "dir", "__dict__", "attrgetter", "methodcaller", "getattr_static", "to_dict", "eval", "exec"}
)
"""Ways to read attributes whose names are not written in the code."""
_BY_NAME = frozenset({"getattr", "hasattr"})
_CALLS = frozenset({"PRECALL", "CALL", "CALL_FUNCTION", "CALL_METHOD", "CALL_KW"})
_IMPORT = dis.opmap["IMPORT_NAME"]


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes in code and the code inside it, and its texts that could be such names."""
    names = {*code.co_names}
    waiting = list(code.co_consts)
    while waiting:
        constant = waiting.pop()
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
        elif isinstance(constant, (tuple, frozenset)):
            waiting += constant
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def imports_in(code: types.CodeType) -> tuple[str, ...]:
    """Names of the modules that code and the code inside it imports, relative ones with their dots."""
    return tuple(name for part in _parts(code) if _IMPORT in part.co_code[::2] for name in _imports(part))


@functools.lru_cache(maxsize=4096)
def computes_names(code: types.CodeType) -> bool:
    """Whether code, or the code inside it, reads attributes whose names ``names_in`` does not tell."""
    for part in _parts(code):
        if not _COMPUTED.isdisjoint(part.co_names):
            return True
        if not _BY_NAME.isdisjoint(part.co_names):
            found = list(dis.get_instructions(part))
            if any(
                entry.argval in _BY_NAME and not _has_literal_name(found[i + 1 :]) for i, entry in enumerate(found)
            ):
                return True
    return False


@functools.lru_cache(maxsize=4096)
def untold_in(code: types.CodeType) -> str:
    """The first of ``UNTOLD`` that code or the code inside it names, "" for none; attributes may be called like
    builtins."""
    for part in _parts(code):
        for instruction in dis.get_instructions(part) if not UNTOLD.isdisjoint(part.co_names) else ():
            name = instruction.argval
            is_attribute = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
            if isinstance(name, str) and name in UNTOLD and not (is_attribute and hasattr(builtins, name)):
                return name
    return ""


def _has_literal_name(following: list[dis.Instruction]) -> bool:
    """Whether the second argument of the call that ends the expression is a text.

    Args:
        following: the instructions behind the one that loads the function.
    """
    depth, literal = 0, False
    for instruction in following:
        before, depth = depth, depth + _stack_effect(instruction)
        if depth < 0:
            return literal and instruction.opname in _CALLS
        if before < 2 <= depth:
            literal = instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, str)
        elif depth == 2 and instruction.opname != "PRECALL":  # what was computed from the text
            literal = False
    return False


def _stack_effect(instruction: dis.Instruction) -> int:
    """How many values an instruction leaves more than it takes, where it does not jump."""
    if instruction.opname in ("PRECALL", "CALL"):  # Python 3.11 has both, and others a CALL that takes the same
        return -1 - (instruction.arg or 0) if instruction.opname == "CALL" else 0
    return dis.stack_effect(instruction.opcode, instruction.arg, jump=False)


def _parts(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code and the code inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)


def _imports(code: types.CodeType) -> Iterator[str]:
    found = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    for i, instruction in enumerate(found):
        if instruction.opcode == _IMPORT:
            yield "." * found[i - 2].argval + instruction.argval
