"""The logits of a model that does not fit into memory: each decoder layer is loaded where it runs, and freed behind.

The model's own code runs, over all of its layers; nothing but the place of their weights changes. Code that reads a
layer's weights outside of the layer finds them on the meta device, which has no numbers, and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from ...passes import NotFinite, UnsupportedModel
from .self_check import SHORT_SCHEDULE, Reference, reference_of_model

if TYPE_CHECKING:  # it brings transformers' modules, which a process that finds its program never needs
    from ..capture.layer_repeat import LayerRepeat


class LayersInFiles(Protocol):
    """Decoder layers of a model whose weights are in files, and on the meta device while they are not loaded.

    Attributes:
        repeat: the layers of the model, of which the first ``repeat.kept`` are always loaded.
    """

    repeat: LayerRepeat

    def load(self, index: int) -> None:
        """Load the weights of a layer.

        Raises:
            ValueError: one is missing or broken.
        """

    def free(self, index: int) -> None:
        """Free them; no-op where they are not loaded."""


def streamed_reference(layers: LayersInFiles, seen: Callable[[int], None]) -> Reference:
    """The logits of ``reference_of_model`` on the sequence of a short check.

    Args:
        layers: of the model.
        seen: called with a layer's index while it is loaded, before it runs.

    Raises:
        UnsupportedModel: as ``reference_of_model``, or its layers cannot be loaded one by one.
        ValueError: a weight is missing or broken.
    """
    failed: list[Exception] = []

    def load(index: int) -> None:
        try:
            layers.load(index)
            seen(index)
        except Exception as error:
            failed.append(error)
            raise

    try:
        with _loaded_where_they_run(layers, load):
            return reference_of_model(layers.repeat.model, SHORT_SCHEDULE)
    except NotFinite:
        raise
    except UnsupportedModel as error:
        if failed:
            raise failed[0] from None
        raise UnsupportedModel(f"with its layers loaded one by one, {error}") from error


@contextmanager
def _loaded_where_they_run(layers: LayersInFiles, load: Callable[[int], None]) -> Iterator[None]:
    repeat = layers.repeat
    hooks = []
    for index, layer in enumerate(repeat.model.get_submodule(repeat.path).children()):
        if index < repeat.kept:
            continue
        hooks.append(layer.register_forward_pre_hook(lambda *_, index=index: load(index)))
        hooks.append(layer.register_forward_hook(lambda *_, index=index: layers.free(index)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for index in range(repeat.kept, repeat.total):
            layers.free(index)
