"""What loading the layers of a model one by one has shown: its logits, and where its tensors are in the files.

It is kept under the checkpoint's fingerprint, whatever the options: a start with another number of ranks reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..options import CompileOptions
from ..verify.streamed_reference import LayersInFiles, streamed_reference
from ..weights.tensor_contents import module_tensors
from .checkpoint_files import CheckpointFiles
from .record import KnownTensors, Sources, start_tensors, warm_key
from .restore import Outdated, StoredReference
from .stored_sources import Assembled

_MOST_BYTES = 1 << 20
"""Of a weight that is made of others and is loaded all the same: passes may read what is small."""


@dataclass(frozen=True)
class StreamedModel:
    """The content of a file about a checkpoint.

    Attributes:
        reference: the model's own logits.
        sources: what its tensors are in the files.
    """

    reference: StoredReference
    sources: Sources


def streamed_key(files: CheckpointFiles) -> str:
    """The name of the file.

    Raises:
        CannotIdentify: something of the settings cannot be described.
    """
    return warm_key(files, CompileOptions()).replace("checkpoint", "logits", 1)


def stream(layers: LayersInFiles, files: CheckpointFiles) -> StreamedModel:
    """Run a model, each of its layers loaded where it runs.

    Raises:
        UnsupportedModel, ValueError: as ``streamed_reference``.
        CannotStore: a weight is not in the files, or not as it was loaded.
    """
    model, repeat = layers.repeat.model, layers.repeat
    named = {name: tensor for name, tensor in module_tensors(model).items() if not tensor.is_meta}
    shown = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    dtypes = {tensor.dtype for tensor in module_tensors(model).values()} | {torch.float32}
    known = KnownTensors(files, dtypes, shown)
    found = [known.sources(named)]
    done: set[int] = set()

    def seen(index: int) -> None:
        if index not in done:
            done.add(index)
            path = f"{repeat.path}.{index}"
            own = module_tensors(model.get_submodule(path))
            found.append(known.sources({f"{path}.{name}": tensor for name, tensor in own.items()}))

    reference = streamed_reference(layers, seen)
    for index in range(repeat.kept, repeat.total):
        if index not in done:  # it did not run
            layers.load(index)
            seen(index)
            layers.free(index)
    sources = Sources({}, {}, {})
    for each in found:
        sources.weights.update(each.weights)
        sources.tensors.update(each.tensors)
        sources.stored.update(each.stored)
    return StreamedModel(StoredReference.of(reference), sources)


def check_streamed(kept: StreamedModel, model: nn.Module) -> None:
    """Check the logits in a file.

    Raises:
        Outdated: they are not of this model.
    """
    table = model.get_input_embeddings().weight  # type: ignore[operator]
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    tokens, logits = kept.reference.tokens, kept.reference.logits
    if not tokens or len(tokens) != len(logits):
        raise Outdated("it holds no logits for its tokens")
    for ids, rows in zip(tokens, logits, strict=True):
        if ids.dtype != torch.int64 or ids.dim() != 1 or not len(ids) or not 0 <= ids.min() <= ids.max() < len(table):
            raise Outdated("it holds other tokens than the model has")
        if rows.dtype != dtype or rows.dim() != 2 or len(rows) != len(ids) or not rows.isfinite().all():
            raise Outdated("its logits are not those of the model")


def place_forms(layers: LayersInFiles, sources: Sources, files: CheckpointFiles) -> None:
    """Give the layers in the files tensors by which they can be compiled: what is mapped or small is loaded, of other
    weights there is the form alone.

    Raises:
        Outdated: a tensor is not one of the module's.
        ValueError: the checkpoint does not hold what one is made of.
    """
    model = layers.repeat.model
    missing = {name: tensor for name, tensor in module_tensors(model).items() if tensor.is_meta}
    named = start_tensors(sources, files, missing)
    made: dict[int, torch.Tensor] = {}
    for name, tensor in missing.items():
        source = named[name]
        if tuple(source.shape) != tuple(tensor.shape):
            raise Outdated(f"{name!r} is {list(tensor.shape)}, and {list(source.shape)} is recorded")
        if id(source) not in made:
            made[id(source)] = _form_of(source)
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = made[id(source)]
        else:
            module._parameters[leaf] = nn.Parameter(made[id(source)], requires_grad=False)


def _form_of(source: torch.Tensor | Assembled) -> torch.Tensor:
    if isinstance(source, torch.Tensor):
        return source
    form = source.form()
    return source.whole() if form.numel() * form.element_size() <= _MOST_BYTES else form
