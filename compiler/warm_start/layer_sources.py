"""Whether each decoder layer of a module was loaded from what the checkpoint's files number so."""

from __future__ import annotations

import re
from collections import defaultdict

from torch import nn

from ...passes import UnsupportedModel
from ..capture.layer_kinds import find_decoder_layers
from ..weights.tensor_contents import module_tensors
from .record import KnownTensors, Sources, number_in


def layers_as_numbered(model: nn.Module, known: KnownTensors, sources: Sources) -> bool:
    """Compare the layers' numbers in a module with those in the names of the files' tensors.

    Args:
        model: as it was loaded.
        known: the files' tensors.
        sources: which of them the module's are.

    Returns:
        True where they are the same; False where the files number layers in another way, or not at all.

    Raises:
        UnsupportedModel: a layer holds what the files say is another's.
    """
    path, _ = find_decoder_layers(model)
    layer = re.compile(rf"{re.escape(path)}\.(\d+)\.")
    named = module_tensors(model)
    owners: dict[int, set[str]] = defaultdict(set)
    for name, tensor in named.items():
        if match := layer.match(name):
            owners[id(tensor)].add(match[1])
    right, wrong = 0, []
    for name, tensor in named.items():
        match = layer.match(name)
        if match is None or len(owners[id(tensor)]) > 1:  # several layers share it
            continue
        for source in _names(sources, name):
            number = number_in(source)
            if number == match[1] or known.is_in_layer(source, match[1]):
                right += 1
            elif number:
                wrong.append(f"{name!r} holds the file's {source!r}")
    if wrong and right > len(wrong):
        raise UnsupportedModel(
            f"{wrong[0]}{f' ({len(wrong)} tensors are like it)' if len(wrong) > 1 else ''}. Please report the model; "
            "verify='off' skips this check"
        )
    return right > 0 and not wrong


def _names(sources: Sources, name: str) -> list[str]:
    """The files' tensors that a tensor of the module is made of."""
    if name in sources.weights:
        return [sources.weights[name][0]]
    return [row for rows in sources.stored[name].rows for row in rows] if name in sources.stored else []
