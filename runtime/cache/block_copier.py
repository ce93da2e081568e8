"""Copies whole blocks of the KV cache: from one to another, to host memory and back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from ..blocks import CacheCopy
from ..memory import discard_pages
from ..program import KVCache


class BlockCopier:
    """Makes the copies that the block manager plans.

    Args:
        kv_cache: the result of ``allocate_kv_cache``; dim 0 of every tensor counts blocks.
        host_cache: the same for the blocks in host memory; empty if there are none.
        group_of_layer: for each entry of the caches, the index of its group of layers.

    Attributes:
        copied_bytes: bytes copied to host memory and back so far.
        seconds: duration of these copies.
        on_copied: called with copies that are made, in the thread that made them.
    """

    def __init__(self, kv_cache: KVCache, host_cache: KVCache, group_of_layer: Sequence[int]) -> None:
        self.copied_bytes = 0
        self.seconds = 0.0
        self.on_copied: Callable[[Sequence[CacheCopy]], None] | None = None
        self._device = _by_group(kv_cache, group_of_layer)
        self._host = _by_group(host_cache, group_of_layer) if host_cache else {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def run(self, copies: Sequence[CacheCopy]) -> None:
        """Make the copies; the result is as if they were made one after the other."""
        self._make(copies)

    def _make(self, copies: Sequence[CacheCopy]) -> None:
        for where, group, sources, targets in _batches(copies):
            self._copy(where, group, sources, targets)
        if self.on_copied is not None:
            self.on_copied(copies)

    def discard(self, group: int, first: int, end: int) -> None:
        """Discard unused blocks ``first`` to ``end - 1``, so that the OS may reclaim their memory on a CPU."""
        for tensor in self._device[group]:
            discard_pages(tensor[first:end])

    def start(self, copies: Sequence[CacheCopy]) -> None:
        """Make the copies in a separate thread until ``join``; nothing else may use their blocks meanwhile."""
        if copies:
            self._failure = None
            self._thread = threading.Thread(target=self._run_guarded, args=(copies,), name="pagoda-block-copier")
            self._thread.start()

    def join(self) -> None:
        """Wait for the copies that ``start`` began.

        Raises:
            Exception: the exception that the copies raised.
        """
        thread = self._thread
        if thread is None:
            return
        thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run_guarded(self, copies: Sequence[CacheCopy]) -> None:
        try:
            self._make(copies)
        except BaseException as error:
            self._failure = error

    @torch.inference_mode()
    def _copy(self, where: str, group: int, sources: list[int], targets: list[int]) -> None:
        started = time.perf_counter()
        to = self._host if where == "out" else self._device
        origin = self._host if where == "in" else self._device
        for into, out_of in zip(to[group], origin[group], strict=True):
            index = torch.tensor(sources, device=out_of.device)
            content = out_of.index_select(0, index).to(into.device)
            into.index_copy_(0, torch.tensor(targets, device=into.device), content)
            if where != "move":
                self.copied_bytes += content.nbytes
        if where != "move":
            self.seconds += time.perf_counter() - started


def _by_group(cache: KVCache, group_of_layer: Sequence[int]) -> dict[int, list[torch.Tensor]]:
    tensors: dict[int, list[torch.Tensor]] = {}
    for layer, group in zip(cache, group_of_layer, strict=True):
        # In memory order: a block of a transposed view would be copied element by element.
        tensors.setdefault(group, []).extend(map(_as_stored, layer))
    return tensors


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (dim != 0, -strides[dim]))
    return tensor.permute(order)


def _batches(copies: Sequence[CacheCopy]) -> list[tuple[str, int, list[int], list[int]]]:
    """Group copies that can be made at once, in order: of one kind, none reads or writes what another wrote."""
    batches: list[tuple[str, int, list[int], list[int]]] = []
    written: set[int] = set()
    for copy in copies:
        if (
            not batches
            or batches[-1][:2] != (copy.where, copy.group)
            or copy.target in written
            or (copy.where == "move" and copy.source in written)
        ):
            batches.append((copy.where, copy.group, [], []))
            written = set()
        batches[-1][2].append(copy.source)
        batches[-1][3].append(copy.target)
        written.add(copy.target)
    return batches
