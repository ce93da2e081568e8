"""What a function's code reads besides its arguments: global names, imports and environment variables."""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass

_UNTOLD = frozenset({"globals", "eval", "exec", "locals", "__import__", "import_module", "open"})
"""Functions that bring in what no name in the code says."""
_ENVIRONMENT = frozenset({"environ", "getenv", "environb", "getenvb"})
_NOTHING = frozenset({"PUSH_NULL", "CACHE", "NOP", "RESUME", "EXTENDED_ARG"})
_COMPUTED = frozenset(
    {"vars", "dir", "__dict__", "attrgetter", "methodcaller", "getattr_static", "to_dict", "eval", "exec"}
)
"""Ways to read attributes whose names are not written in the code."""
_BY_NAME = frozenset({"getattr", "hasattr"})
_CALLS = frozenset({"PRECALL", "CALL", "CALL_FUNCTION", "CALL_METHOD", "CALL_KW"})
_OPERAND = ("LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_SMALL_INT")
_IMPORT = dis.opmap["IMPORT_NAME"]


class Untold(Exception):
    """What the code reads cannot be told. The message says what."""


@dataclass(frozen=True)
class Import:
    """An import statement inside a function.

    Attributes:
        name: the module's, as written.
        level: number of leading dots.
        items: what is taken from it.
    """

    name: str
    level: int
    items: tuple[str, ...]


@dataclass(frozen=True)
class Reads:
    """What a function's code and the code inside it reads.

    Attributes:
        names: globals and attributes, without a distinction.
        imports: its import statements.
        variables: environment variables, named in the code.
        variable_globals: globals that hold the name of one.
    """

    names: tuple[str, ...]
    imports: tuple[Import, ...]
    variables: tuple[str, ...]
    variable_globals: tuple[str, ...]


def reads_of(code: types.CodeType) -> Reads:
    """What ``code`` reads.

    Raises:
        Untold: it reads an environment variable, a file or a name that is not written in it.
    """
    names: dict[str, None] = {}
    imports: list[Import] = []
    variables: list[tuple[bool, str]] = []
    for part in _parts(code):
        names.update(dict.fromkeys(part.co_names))
        if not _UNTOLD.isdisjoint(part.co_names):
            _refuse_untold(part)
        if _IMPORT in part.co_code[::2]:
            imports += _imports(part)
        if not _ENVIRONMENT.isdisjoint(part.co_names):
            variables += _variables(part)
    return Reads(
        tuple(names),
        tuple(imports),
        tuple(name for is_global, name in variables if not is_global),
        tuple(name for is_global, name in variables if is_global),
    )


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
def imports_in(code: types.CodeType) -> tuple[Import, ...]:
    """Import statements in code and the code inside it."""
    return tuple(entry for part in _parts(code) if _IMPORT in part.co_code[::2] for entry in _imports(part))


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
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)


def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    return [i for i in dis.get_instructions(code) if i.opname not in _NOTHING]


def _refuse_untold(code: types.CodeType) -> None:
    for instruction in _instructions(code):
        name = instruction.argval
        is_attribute = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
        if name in _UNTOLD and (name == "import_module" or (hasattr(builtins, name) and not is_attribute)):
            raise Untold(f"{code.co_name} calls {name}()")


def _imports(code: types.CodeType) -> Iterator[Import]:
    found = _instructions(code)
    for i, instruction in enumerate(found):
        if instruction.opname == "IMPORT_NAME":
            level, items = found[i - 2].argval, found[i - 1].argval
            yield Import(instruction.argval, level if isinstance(level, int) else 0, items or ())


def _variables(code: types.CodeType) -> Iterator[tuple[bool, str]]:
    """Names of environment variables that are read, and whether each is that of a global that holds it."""
    found = _instructions(code)
    for i, instruction in enumerate(found):
        if instruction.argval not in _ENVIRONMENT or not instruction.opname.startswith(("LOAD_", "IMPORT_")):
            continue
        following = found[i + 1 : i + 6]
        if following and following[0].argval == "get":
            following = following[1:]
        if following and following[0].opname == "CONTAINS_OP":
            of_os = found[i - 1].argval == "os"
            name, ends = found[i - 1 - of_os], True
        else:
            name, ends = following[0], _takes_first(following[1:])
        is_global = name.opname == "LOAD_GLOBAL"
        if not ends or not isinstance(name.argval, str) or not (is_global or name.opname == "LOAD_CONST"):
            raise Untold(f"{code.co_name} reads an environment variable whose name is not written there")
        yield is_global, name.argval


def _takes_first(following: list[dis.Instruction]) -> bool:
    """Whether a call or a subscript takes the operand before, as it is; a default may come between."""
    if len(following) > 1 and following[0].opname.startswith(_OPERAND):
        following = following[1:]
        return following[0].opname in _CALLS
    return bool(following) and (
        following[0].opname in _CALLS or following[0].opname == "BINARY_SUBSCR" or following[0].argrepr == "[]"
    )


cached_reads = functools.lru_cache(maxsize=4096)(reads_of)
