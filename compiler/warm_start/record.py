"""Records of checkpoints: which stored program is theirs, and which of their tensors its inputs receive.

With a record a start needs no model class: nothing of transformers' models is imported, no module is made, and no
weight is read but through the program. A record holds as long as everything is as it was when the class was imported
and its module described: the checkpoint's files, the source files behind the class, what is installed, and the
modules of the framework that are loaded; and as long as nothing is registered with transformers. A program that was
taken by a record is compared with the logits that were stored with it.

Code in memory may be another than its file's. So a record is made only where one could be used, in a process that had
no module of models loaded before. What else was loaded before must be loaded in a process that uses it, and be alike.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ...runtime.ops.linear.stored_weight import StoredWeight
from ..live_module.describer import CannotIdentify
from ..options import CompileOptions
from ..weights.file_pages import FilePages
from ..weights.tensor_contents import module_tensors, stored_digest
from .checkpoint_files import CheckpointFiles, sample_digest
from .framework_state import (
    changed_module,
    check_nothing_registered,
    framework_states,
    loaded_of_models,
)
from .graph_data import CannotStore
from .identity import Identity, settings_digest
from .restore import Outdated
from .stored_sources import Assembled, StoredSource, float_source, stored_source

log = logging.getLogger(__name__)

_MOST_BYTES = 16 << 20
"""Of tensors that no file of the checkpoint holds, together: rotary frequencies and the like."""
_FRAMEWORK = frozenset(("torch", "transformers", "huggingface_hub"))
_SETTINGS = ("TRANSFORMERS_", "USE_")
"""How environment variables begin that transformers reads when it makes a model."""

_FACTS = {
    "generation_config": (
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"),
        *("do_sample", "eos_token_id"),
    ),
    "config": ("eos_token_id",),
}
"""Values that serving a model takes of its configs, which a start by a record does not make."""
Facts = dict[str, dict[str, Any]]
"""Config → name → value."""


@dataclass(frozen=True)
class Sources:
    """What a module's tensors are in the files of its checkpoint; see ``Record``.

    Attributes:
        weights, tensors, stored: as there.
    """

    weights: dict[str, tuple[str, torch.dtype | None]]
    tensors: dict[str, torch.Tensor]
    stored: dict[str, StoredSource]


@dataclass(frozen=True)
class Record:
    """The content of a file about a checkpoint.

    Attributes:
        program: the key of its program.
        weights: the module's tensor → the checkpoint's, and the dtype that it is converted to (None: its own).
        tensors: those of the module that no file holds.
        sources: Python modules behind the class, and of transformers all that were loaded → SHA-256 of their files.
        states: loaded modules of the framework → their digests.
        before: those and the sources that were loaded before the model was.
        facts: what else a server of the model has to know of its configs.
        stored: the module's tensor → the checkpoint's weights that it is made of, where these are quantized or
            several.
    """

    program: str
    weights: dict[str, tuple[str, torch.dtype | None]]
    tensors: dict[str, torch.Tensor]
    sources: dict[str, str]
    states: dict[str, str]
    before: list[str]
    facts: Facts
    stored: dict[str, StoredSource] = field(default_factory=dict)


def warm_key(files: CheckpointFiles, options: CompileOptions) -> str:
    """The name of a checkpoint's record, for these options, this machine and these versions.

    Raises:
        CannotIdentify: something of it cannot be described.
    """
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith(_SETTINGS))
    packages = sorted(p.name for p in Path(sysconfig.get_path("purelib")).iterdir() if p.suffix == ".dist-info")
    return "checkpoint-" + settings_digest(options, [files.contents(), settings, packages])


def describe_start(
    model: nn.Module,
    found: Identity,
    files: CheckpointFiles,
    facts: Facts,
    loaded: Container[str],
    made_of: Sources | None = None,
) -> Record:
    """The record of a checkpoint that ``model`` was just loaded from.

    Args:
        model: as it was loaded.
        found: its identity.
        files: the checkpoint's.
        facts: see ``Record``.
        loaded: names of the Python modules that were loaded before the model was.
        made_of: where its tensors are, if that is known.

    Raises:
        CannotStore: the module is not made of the files' tensors, or of code that the record could not check.
        CannotIdentify: something that is not the framework's stands in a module of it, or is registered with it.
    """
    kind = type(model)
    if not kind.__module__.startswith("transformers.models."):
        raise CannotStore(f"{kind.__qualname__} is not transformers' own")
    sources = dict(found.sources)
    for name in sources:
        if name.partition(".")[0] not in _FRAMEWORK or _source(name) is None:
            raise CannotStore(f"its code is in {name}, too")
    if (name := loaded_of_models(sources, loaded)) is not None:
        raise CannotStore(f"{name} was loaded before, and may have been changed")
    check_nothing_registered()
    states = framework_states()
    sources |= {name: _digest(name) for name in states if name.startswith("transformers.")}
    made_of = sources_in_files(model, files) if made_of is None else made_of
    before = sorted(name for name in sources.keys() | states if name in loaded)
    return Record(found.digest, made_of.weights, made_of.tensors, sources, states, before, facts, made_of.stored)


def record_or_none(
    model: nn.Module,
    options: CompileOptions,
    found: Identity,
    files: CheckpointFiles,
    loaded: Container[str],
    made_of: Sources | None = None,
) -> tuple[str, Record] | None:
    """The name and contents of the record by which a later start finds the program; None if there can be none."""
    if (facts := facts_of(model)) is None:
        return None
    try:
        return warm_key(files, options), describe_start(model, found, files, facts, loaded, made_of)
    except (CannotIdentify, CannotStore, OSError, ValueError) as error:
        log.info("later starts will have to load the model's class: %s", error)
        return None


def sources_in_files(model: nn.Module, files: CheckpointFiles) -> Sources:
    """What the tensors of a module that was just loaded are in its files.

    Raises:
        CannotStore: a parameter is none of them.
    """
    return known_tensors(model, files).sources(module_tensors(model))


def known_tensors(model: nn.Module, files: CheckpointFiles) -> KnownTensors:
    """The tensors of the files that a module was just loaded from.

    Raises:
        ValueError: as ``KnownTensors``.
    """
    named = module_tensors(model)
    return KnownTensors(files, {tensor.dtype for tensor in named.values()}, _dtype_of_stored(named))


class KnownTensors:
    """The tensors of a checkpoint's files, by what they hold.

    Args:
        files: the checkpoint's.
        dtypes: those that the model has.
        shown: in which quantized weights are.

    Raises:
        ValueError: a file, or a quantized weight, cannot be read.
    """

    def __init__(self, files: CheckpointFiles, dtypes: Collection[torch.dtype], shown: torch.dtype) -> None:
        self._numbers: dict[str, set[str]] = defaultdict(set)  # of the layers that hold it, by digest
        self._digests: dict[str, list[str]] = defaultdict(list)  # in all dtypes
        self._own: dict[str, str] = {}
        self._quantized: dict[str, str] = {}
        converted: dict[str, tuple[str, torch.dtype | None]] = {}
        pages: FilePages | None = None
        for name, tensor in files.of_a_float_checkpoint(shown):
            if pages is None:
                pages = FilePages([tensor])
            if isinstance(tensor, StoredWeight):
                self._quantized[name] = stored_digest(tensor)
                self._note(name, self._quantized[name])
            else:
                self._own[name] = sample_digest(tensor)
                self._note(name, self._own[name])
                for dtype in set(dtypes) - {tensor.dtype} if tensor.is_floating_point() else ():
                    digest = sample_digest(tensor, dtype)
                    converted.setdefault(digest, (name, dtype))
                    self._note(name, digest)
            pages.drop_tensors([tensor])  # the system has read much around the samples
        self._by_content = {
            **converted,
            **{digest: (name, None) for name, digest in reversed(self._own.items())},
        }
        self._names = {digest: name for digest, (name, _) in self._by_content.items()}

    def is_in_layer(self, name: str, number: str) -> bool:
        """Whether a tensor with this number holds the same as the tensor ``name``, in one of the model's dtypes."""
        return any(number in self._numbers[digest] for digest in self._digests.get(name, ()))

    def _note(self, name: str, digest: str) -> None:
        self._digests[name].append(digest)
        self._numbers[digest].add(number_in(name))

    def sources(self, named: Mapping[str, torch.Tensor]) -> Sources:
        """What tensors of the model are in the files.

        Raises:
            CannotStore: a parameter is none of them.
        """
        held: dict[str, tuple[str, torch.dtype | None]] = {}
        kept: dict[str, torch.Tensor] = {}
        stored: dict[str, StoredSource] = {}
        for name, tensor in named.items():
            if isinstance(tensor, StoredWeight):
                made_of = stored_source(tensor, name, self._quantized)
                if made_of is None:
                    raise CannotStore(f"its files hold no quantized weights that make {name!r}")
                stored[name] = made_of
                continue
            source = self._by_content.get(sample_digest(tensor)) if tensor.is_contiguous() else None
            if source is not None:
                is_own = self._own.get(name) == self._own[source[0]] and source[1] is None
                held[name] = (name, None) if is_own else source
            elif not isinstance(tensor, nn.Parameter):
                kept[name] = tensor.detach().clone()
            elif (made_of := float_source(tensor, self._names)) is not None:
                stored[name] = made_of
            else:
                raise CannotStore(f"its files hold no tensor that is {name!r}")
        if sum(t.numel() * t.element_size() for t in kept.values()) > _MOST_BYTES:
            raise CannotStore(f"its buffers are larger than {_MOST_BYTES >> 20} MiB")
        return Sources(held, kept, stored)


def number_in(name: str) -> str:
    """The first part of a tensor's name that is a number, its layer's; "" where none is."""
    return next((part for part in name.split(".") if part.isdecimal()), "")


def _dtype_of_stored(named: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The dtype that the first quantized weight is shown in; any where there is none."""
    return next((tensor.dtype for tensor in named.values() if isinstance(tensor, StoredWeight)), torch.bfloat16)


def check_record(record: Record) -> None:
    """Compare what a record was made with and what there is now.

    Raises:
        Outdated: something else would be loaded, or might be.
        CannotIdentify: as ``describe_start``.
    """
    if (name := loaded_of_models(record.sources, sys.modules)) is not None:
        raise Outdated(f"{name} is loaded, and may have been changed")
    if (name := next((name for name in record.before if name not in sys.modules), None)) is not None:
        raise Outdated(f"{name} was loaded before the model was, and may have been changed")
    check_nothing_registered()
    for module, digest in record.sources.items():
        if _digest(module) != digest:
            raise Outdated(f"the source of {module} is another")
    if (changed := changed_module(record.states)) is not None:
        raise Outdated(f"{changed} was changed in this process")


def start_tensors(
    record: Record | Sources, files: CheckpointFiles, needed: Iterable[str], *, in_parts: bool = False
) -> dict[str, torch.Tensor | Assembled]:
    """The tensors that the module would have under the names that are needed.

    Args:
        record: says what they are.
        files: the checkpoint's.
        needed: names.
        in_parts: the program is one of several ranks, see ``CheckpointFiles.tensors``.

    Raises:
        Outdated: one of them is missing.
        ValueError: the checkpoint does not hold what one of them is made of.
    """
    shown = next((source.dtype for source in record.stored.values() if source.form), torch.bfloat16)
    find = files.finder(shown, in_parts=in_parts)
    assembled: dict[StoredSource, Assembled] = {}
    found: dict[str, torch.Tensor | Assembled] = {}
    for name in needed:
        made_of = record.stored.get(name)
        if made_of is None and (source := record.weights.get(name)) is not None:
            tensor = find(source[0])
            if tensor is None:
                raise Outdated(f"the checkpoint has no {source[0]!r}")
            if not isinstance(tensor, torch.Tensor):
                tensor = tensor.whole()  # floats: quantized weights are in ``stored``
            if source[1] is None or not tensor.dim():
                found[name] = tensor if source[1] is None else tensor.to(source[1])
                continue
            made_of = StoredSource(((source[0],),), False, "", source[1], False)
        if made_of is not None:
            if made_of not in assembled:
                assembled[made_of] = Assembled(made_of, find)
            found[name] = assembled[made_of]
            continue
        if name not in record.tensors:
            raise Outdated(f"nothing is recorded of {name!r}")
        found[name] = record.tensors[name]
    return found


def _digest(name: str) -> str:
    """The SHA-256 of the file of a Python module; "" where there is none."""
    path = _source(name)
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def _source(name: str) -> Path | None:
    """The file of a Python module, found without importing it; None where that cannot be."""
    top, *inner = name.split(".")
    spec = importlib.util.find_spec(top)
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        return None
    path = Path(next(iter(folders)), *inner)
    for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        if inner and file.is_file():
            return file
    return None if inner else path / "__init__.py"


def facts_of(model: Any) -> Facts | None:
    """The facts of a model; None where a config holds something unusual."""
    facts = {
        owner: {name: getattr(getattr(model, owner, None), name, None) for name in names}
        for owner, names in _FACTS.items()
    }
    return facts if all(_is_plain(value) for found in facts.values() for value in found.values()) else None


def model_of(facts: Facts) -> Any:
    """An object whose ``config`` and ``generation_config`` say what those of the model said."""
    return SimpleNamespace(**{owner: SimpleNamespace(**found) for owner, found in facts.items()})


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(type(entry) is int for entry in value)
    return type(value) in (type(None), bool, int, float)
