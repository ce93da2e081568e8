"""What a compiled program depends on, as one digest: another model, option, version or source is another program.

The module is described as it is in memory, not as its checkpoint says (see ``describer``), with how its tensors lie
in memory and share it, and what is in them: buffers and small parameters in full, since passes read them; large
parameters by samples, since only the verdict of the self-check depends on their values. Parameters that a program
computed constants from are compared in full when it is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ...runtime.ops.native import processor
from ..options import CompileOptions, selected_passes
from ..report import first_line
from .describer import CannotIdentify, Describer

_ROOT = Path(__file__).resolve().parents[1]
_OURS = (_ROOT, _ROOT.parent / "passes", _ROOT.parent / "runtime")


@dataclass(frozen=True)
class Fingerprint:
    """Everything that compiling a model depends on.

    Attributes:
        digest: of all of it.
        sources: Python modules whose files count, and the SHA-256 of each.
        variables: environment variables that the model's code reads, with their values.
    """

    digest: str
    sources: dict[str, str]
    variables: dict[str, str | None]


def fingerprint(model: nn.Module, options: CompileOptions, contents: str) -> Fingerprint:
    """Everything that compiling ``model`` with ``options`` depends on.

    Args:
        model: a module on the CPU.
        options: how it is compiled.
        contents: what its tensors hold, as ``contents_digest`` says it.

    Raises:
        CannotIdentify: something that the program may depend on cannot be described.
    """
    with _told():
        describer = Describer()
        _add_settings(describer, options)
        describer.add(contents)
        describer.add_module(model)
        return Fingerprint(describer.digest(), dict(describer.sources), dict(describer.variables))


def settings_digest(options: CompileOptions, more: Any) -> str:
    """A digest of all that compiling depends on besides the model: options, versions, the state of this thread.

    Args:
        options: how a model is compiled.
        more: what counts besides, made of literals and containers.

    Raises:
        CannotIdentify: something of it cannot be described.
    """
    with _told():
        describer = Describer()
        _add_settings(describer, options)
        describer.add(more)
        return describer.digest()


def _add_settings(describer: Describer, options: CompileOptions) -> None:
    describer.add((*environment(), torch.get_default_dtype(), *_modes()))
    describer.add(options)
    describer.add([selected_passes(options, stage) for stage in ("dynamo", "aten", "weights")])


@contextmanager
def _told() -> Iterator[None]:
    """Objects run code of their own when they are looked at: one that fails there cannot be told, no more."""
    try:
        yield
    except CannotIdentify:
        raise
    except Exception as error:
        raise CannotIdentify(f"looking at it fails: {type(error).__name__}: {first_line(error)}") from error


def describe(item: Any) -> str:
    """A digest of any value, for comparisons within this process.

    Raises:
        CannotIdentify: something in it cannot be described.
    """
    with _told():
        describer = Describer(follows=False)
        describer.add(item)
        return describer.digest()


def describe_module(module: nn.Module, more: Any, ignores: Callable[[str], bool]) -> str:
    """A digest of what a module is, whatever its tensors hold; for comparisons within this process.

    Args:
        module: it, with all those below it.
        more: what counts besides.
        ignores: whether an attribute of this name does not count.

    Raises:
        CannotIdentify: something in it cannot be described.
    """
    with _told():
        describer = Describer(ignores, follows=False)
        describer.add(more)
        describer.add_module(module)
        return describer.digest()


@functools.cache
def environment() -> tuple[str, ...]:
    """Versions, the processor, and a digest of our own sources."""
    digest = hashlib.sha256()
    for root in _OURS:
        for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cpp", ".h")):
            digest.update(f"{path.relative_to(root.parent)}\0".encode())
            digest.update(path.read_bytes())
    versions = (sys.version, torch.__version__, transformers.__version__)
    return (*versions, platform.machine(), processor(), digest.hexdigest())


def _modes() -> tuple[Any, ...]:
    """What changes the meaning of torch's functions in this thread.

    Raises:
        CannotIdentify: a mode whose effect is not known, or a kernel of torch's operators that was registered here.
    """
    modes: list[Any] = [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")]
    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        if type(mode) is not DeviceContext:
            raise CannotIdentify(f"the mode {type(mode).__name__} is active")
        modes.append(mode.device)
    if own := sorted(
        name for name in torch.library._impls if name.startswith("aten/") and name.endswith(("CPU", "AutogradCPU"))
    ):
        raise CannotIdentify(f"a kernel of {own[0]} was registered in this process")
    return tuple(modes)
