"""The order of floors: a file imports what lies on a lower floor than its own, or in its own room; never upwards."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

FLOORS = {
    "": ("torch_pagoda", "compiler", "passes", "runtime"),
    "torch_pagoda": (
        *(
            "__main__",
            "fleet",
            "cli",
            "__init__",
            "async_llm generation reports",
            "npu_tools",
            "llm",
            "block_fingerprint draft_program serving",
            "compiled_model rank rendering",
            "shipping",
            "chat default_params options",
            "load_options",
            "checkpoint",
        ),
        "decoding device",
    ),
    "compiler": (
        *(
            "__init__",
            "public",
            "compile",
            "head_program ranks",
            "build",
            "npu_program",
            "backend costs warm_start",
            "pipeline",
            "pass_runs pass_stages",
            "calibrate verify",
            "capture",
        ),
        *("live_module", "link options", "choices option_conflicts targets", "report tolerance user_passes weights"),
    ),
    "passes": ("__init__", "rewrite", "lower proof recognize schedule sharding", "graph"),
    "runtime": (
        *(
            "engine",
            "parallel speculation",
            "block_store cache",
            "batching profiling program sampling",
            "ops",
            "requests",
            "structured",
        ),
        *(
            "npu_errors",
            "__init__ autocast blocks memory option phases private_folder processors restart_limit shown "
            "step_metadata token_bytes",
            "cann_toolkit control_group device_queue npu_target process_state state_tables window_blocks",
        ),
    ),
    "serving": (
        *("fleet", "__init__ app server", "protocol", "generation", "http page", "settings", "monitoring"),
        "engine_process formats",
    ),
}
"""Folder → its floors from the top downwards; each names the rooms (files and folders) that lie beside each other."""


def upward_imports(root: Path) -> Iterator[str]:
    """A line for each import that goes upwards or sideways, and for each room that is on no floor."""
    for file in sorted(path for house in FLOORS[""] for path in (root / house).rglob("*.py")):
        rooms = _rooms(file.relative_to(root).with_suffix("").parts)
        for target in _imported(file, root):
            for folder, own, other in zip(("", *rooms), rooms, _rooms(target), strict=False):
                if own != other:
                    yield from _judge(file.relative_to(root), folder, own, other)
                    break


def _judge(file: Path, folder: str, own: str, other: str) -> Iterator[str]:
    if folder not in FLOORS:
        return
    floor = {room: i for i, rooms in enumerate(FLOORS[folder]) for room in rooms.split()}
    for room in (own, other):
        if room not in floor:
            yield f"{file}: {folder}/{room} is on no floor of FLOORS"
            return
    if floor[own] >= floor[other]:
        yield f"{file} imports {folder}/{other}, which does not lie below {folder}/{own}"


def _rooms(parts: tuple[str, ...]) -> tuple[str, ...]:
    """House, room and what is in it of a file: of ``("runtime", "ops", "npu", "moe")`` the first three."""
    return (*parts, "__init__")[:3]


def _imported(file: Path, root: Path) -> Iterator[tuple[str, ...]]:
    """The modules of ours that a file imports, as parts of their paths."""
    package = file.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        # In torch_pagoda/ the houses are its own submodules; from within them it is the package around.
        base = ("torch_pagoda", *(p for p in package if p != "torch_pagoda"))
        if node.level:
            base = base[: len(base) - node.level + 1]
        elif (node.module or "").split(".")[0] != "torch_pagoda":
            continue
        module = tuple((node.module or "").split(".")) if node.module else ()
        module = (*base, *module) if node.level else module
        for alias in node.names:
            yield _path((*module, alias.name), root) or _path(module, root) or module


def _path(module: tuple[str, ...], root: Path) -> tuple[str, ...] | None:
    """Parts of the path of a module; None where there is none of that name."""
    parts = module[1:] if len(module) > 1 and module[1] in FLOORS[""][1:] else module
    file = root.joinpath(*parts)
    if file.with_suffix(".py").is_file():
        return parts
    return (*parts, "__init__") if (file / "__init__.py").is_file() else None


def test_no_import_goes_upwards():
    assert list(upward_imports(ROOT)) == []


@pytest.mark.parametrize(
    "file, line, found",
    [
        ("runtime/engine/engine.py", "from ...passes import PASSES", "runtime/engine/engine.py imports /passes"),
        ("compiler/capture/trace.py", "from ..verify.self_check import check", "compiler/verify, which does not lie"),
        ("passes/recognize/rope.py", "from ..lower.npu import limits", "passes/lower, which does not lie below"),
        ("compiler/link/linker.py", "def f():\n    from torch_pagoda.compiler import build", "compiler/build, which"),
        ("runtime/cellar/wine.py", "from ..requests.request import Request", "runtime/cellar is on no floor"),
        (
            "torch_pagoda/serving/http/auth.py",
            "from ..protocol.chat import chat_router",
            "not lie below serving/http",
        ),
        ("torch_pagoda/chat.py", "from .llm import LLM", "torch_pagoda/llm, which does not lie below"),
    ],
)
def test_an_upward_import_is_found(tmp_path, file, line, found):
    for path in (path for house in FLOORS[""] for path in (ROOT / house).rglob("*.py")):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(f"{line}\n")
    (message,) = upward_imports(tmp_path)
    assert found in message
