"""Programs of several ranks: what rank 0 sends to the others, and what they make of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .checkpoint.loading import checkpoint_files, load_model
from .compiler import CheckpointFiles, CompileOptions
from .compiler.compile import program_of_rank
from .compiler.warm_start.file import from_bytes, to_bytes
from .compiler.warm_start.shipment import Shipment
from .load_options import LoadOptions
from .runtime.parallel.launch import Ranks
from .runtime.parallel.messages import Message
from .runtime.restart_limit import RestartLimit

if TYPE_CHECKING:
    from .compiler.link.linker import LinkedProgram
    from .runtime.parallel.group import RankGroup
    from .runtime.program import Program


class ShippingRanks:
    """The other ranks of a model that is loaded from a checkpoint (``compiler.warm_start.shipment.OtherRanks``).

    They start at once, and share this process's threads with it.

    Args:
        model: the checkpoint.
        loading: how it is loaded.
        size: number of ranks, this one included.
    """

    def __init__(self, model: str | os.PathLike[str], loading: LoadOptions, size: int) -> None:
        self._model, self._loading = os.fspath(model), loading
        if "OMP_NUM_THREADS" not in os.environ:  # which is meant for each process
            torch.set_num_threads(max(1, torch.get_num_threads() // size))
        self._ranks = Ranks(size, restarts=RestartLimit(loading.worker_restarts))

    def load(self, shipment: Shipment) -> None:
        """Send the program; the others load it while this rank packs its own part."""
        files = None if shipment.sources is None else checkpoint_files(self._model, self._loading.dtype)
        values = {
            "model": self._model,
            "dtype": str(self._loading.dtype),
            "trust_remote_code": self._loading.trust_remote_code,
            "files": [] if files is None else _states(files),
        }
        program = torch.frombuffer(bytearray(to_bytes(shipment)), dtype=torch.uint8)
        self._ranks.load(Message("load", values, {"program": program}))

    def lead(self, program: LinkedProgram) -> Program:
        """The program of all ranks; waits for the others."""
        return self._ranks.lead(program)

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()


def other_ranks(
    model: object, loading: LoadOptions, compiling: CompileOptions, device: torch.device
) -> ShippingRanks | None:
    """The ranks that the options ask for besides this process; None for one rank.

    Raises:
        ValueError: the model cannot be run by several ranks.
    """
    size = compiling.tensor_parallel_size
    if size == 1:
        return None
    asked = f"tensor_parallel_size={size}"
    if not isinstance(model, str | os.PathLike):
        raise ValueError(f"{asked}: every rank reads the checkpoint, and a live module has none; pass its folder")
    if device.type != "cpu" or compiling.target == "npu":
        raise ValueError(f"{asked} runs on CPUs only so far; omit it, or use device='cpu'")
    if size > (cores := len(os.sched_getaffinity(0))):
        raise ValueError(f"{asked} is more than the {cores} processors that this process may use; lower it")
    return ShippingRanks(model, loading, size)


def load_program(message: Message, group: RankGroup) -> Program:
    """Make this rank's part of the program that rank 0 sent.

    Args:
        message: of kind ``"load"``, from ``ShippingRanks``.
        group: all ranks.

    Raises:
        ValueError: the checkpoint is not the one that rank 0 reads.
    """
    values = message.values
    shipment = from_bytes(memoryview(message.tensors["program"].numpy()), Shipment)
    if shipment.sources is None:
        module = load_model(values["model"], values["dtype"], values["trust_remote_code"], torch.device("cpu"))
        return program_of_rank(shipment, group.rank, None, module)
    files = checkpoint_files(values["model"], values["dtype"])
    if files is None or _states(files) != values["files"]:
        raise ValueError(f"the files of {values['model']!r} have changed since rank 0 read them; start again")
    return program_of_rank(shipment, group.rank, files, None)


def _states(files: CheckpointFiles) -> Sequence[Sequence[int]]:
    """What the system says of the files: another one, or one that was written, differs."""
    stats = map(os.stat, files.weights)
    return [[stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns] for stat in stats]
