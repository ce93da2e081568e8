"""Traced graphs that are kept from run to run, in pytest's cache.

A graph is found by the digest of its model, which a test may define, of the sources of the product and of
``tests/support``, and of the releases of torch and transformers; with any of them changed it is traced anew. What
cannot be pickled is not kept.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
import sys
import tempfile
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from torch_pagoda.passes import TracedGraph

ROOT = Path(__file__).resolve().parents[2]
_APART = ("module", "fake_mode", "constants", "_origin")
_OPTIONS = Options(ops_filter=None, node_metadata_key_filter=lambda key: key not in ("grapharg", "tensor_dict"))


class GraphsOnDisk:
    """A folder of graphs without their tensors.

    Args:
        folder: where they are kept; those of other sources are removed.
    """

    def __init__(self, folder: Path) -> None:
        digest = _digest_of_sources()
        self.folder = folder / digest
        for other in folder.glob("*"):
            if other.name != digest:
                shutil.rmtree(other, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)

    def load(self, key: str) -> tuple[TracedGraph, dict[str, str | torch.Tensor], Any] | None:
        """What was given to ``save``, with a mode of its own; None if it is not there."""
        try:
            graph, rest = pickle.loads(zlib.decompress((self.folder / key).read_bytes()))
            mode = FakeTensorMode(shape_env=ShapeEnv())
            module, more = GraphPickler.loads(graph, mode)
        except (OSError, ImportError, AttributeError):  # not kept, or of a test module that was not collected
            return None
        tensors, given = torch.load(io.BytesIO(rest), weights_only=False)
        return TracedGraph(module, mode, {}, **given), tensors, more

    def save(self, key: str, graph: TracedGraph, tensors: dict[str, str | torch.Tensor], more: Any) -> None:
        graph = graph.copy()
        for node in graph.graph.nodes:
            # A view drags its base and that one's mode along; detached it is as large and lies where it lay.
            node.meta = {name: pytree.tree_map_only(FakeTensor, _detached, item) for name, item in node.meta.items()}
        given = {f.name: getattr(graph, f.name) for f in fields(graph) if f.name not in _APART}
        rest = io.BytesIO()
        try:
            torch.save((tensors, given), rest)
            data = pickle.dumps((GraphPickler.dumps((graph.module, more), _OPTIONS), rest.getvalue()))
        except Exception:  # of classes and functions that have no name of their own
            return
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            file.write(zlib.compress(data, 1))
        os.replace(file.name, self.folder / key)


def _detached(tensor: FakeTensor) -> torch.Tensor:
    return tensor.detach() if tensor._is_view() else tensor


def _digest_of_sources() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__} {sys.version}".encode())
    for folder in ("compiler", "passes", "runtime", "torch_pagoda", "tests/support"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
