"""Programs of several ranks: what rank 0 sends to the others, and what they make of it."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from .checkpoint.loading import checkpoint_files, load_model
from .compiler import CheckpointFiles, CompileOptions
from .compiler.ranks.lead import program_of_rank
from .compiler.warm_start.file import from_bytes, to_bytes
from .compiler.warm_start.shipment import Shipment
from .load_options import LoadOptions
from .runtime.parallel.device_group import VISIBLE, Backend, environment_of, meet_on_devices, visible_devices
from .runtime.parallel.facts import facts
from .runtime.parallel.launch import Launch, Ranks
from .runtime.parallel.messages import Message
from .runtime.parallel.ray_placement import check_ray, join_ray
from .runtime.parallel.ray_ranks import RayRanks
from .runtime.parallel.torchrun import LaunchedRanks, Place, follow_first, host_id
from .runtime.parallel.workers import COMMAND
from .runtime.processors import bind, shares, threads_per_rank
from .runtime.restart_limit import RestartLimit

if TYPE_CHECKING:
    from .compiler.link.linker import LinkedProgram
    from .runtime.parallel.group import RankGroup
    from .runtime.parallel.leader import LeaderProgram
    from .runtime.program import Program

_SAMPLES, _SAMPLE_BYTES = 256, 4096
_RESTARTS = 3


class ShippingRanks:
    """The other ranks of a model that is loaded from a checkpoint (``compiler.warm_start.shipment.OtherRanks``).

    They start at once, and share this process's threads with it.

    Args:
        model: the checkpoint.
        loading: how it is loaded.
        compiling: say how many ranks there are, and how many stages they run.
        launched: the others, where a launcher has started them.
        backend: of a group of NPUs, see ``DeviceGroup``; "" for CPUs.

    Raises:
        ValueError: Ray is to start them, and cannot.

    Attributes:
        device: that this process computes on.
        local_size: ranks on this host.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        loading: LoadOptions,
        compiling: CompileOptions,
        launched: LaunchedRanks | None,
        backend: Backend | Literal[""] = "",
    ) -> None:
        size = compiling.world_size
        self._model, self._loading = os.fspath(model), loading
        self.device = _device(backend, launched)
        torch.set_num_threads(threads_per_rank(size if launched is None else launched.place.local_size))
        restarts = loading.worker_restarts
        self._ranks = Ranks(
            size,
            stages=compiling.pipeline_parallel_size,
            launch=self._launch(compiling, launched),
            known={} if launched is None else _known(model, loading, compiling),
            step_timeout=loading.step_timeout,
            restarts=RestartLimit((0 if backend or launched else _RESTARTS) if restarts is None else restarts),
            **on_devices(backend, size),
        )
        self.local_size = 1 + sum(pid > 0 for pid in self._ranks.pids)

    def _launch(self, compiling: CompileOptions, launched: LaunchedRanks | None) -> Callable[[], Launch] | None:
        """What starts the others; None: child processes."""
        if launched is not None:
            return lambda: launched
        if self._loading.distributed_executor_backend != "ray":
            return None
        threads, size = torch.get_num_threads(), compiling.world_size
        if Path(self._model).exists():
            self._model = os.path.abspath(self._model)  # the others have other working folders
        return lambda: RayRanks(size, compiling.pipeline_parallel_size, threads, {"CPU": threads}, load_program)

    def load(self, shipment: Shipment) -> None:
        """Send the program; the others load it while this rank packs its own part."""
        files = None if shipment.sources is None else checkpoint_files(self._model, self._loading.dtype)
        values = {
            "model": self._model,
            "dtype": str(self._loading.dtype),
            "trust_remote_code": self._loading.trust_remote_code,
            "files": [] if files is None else _states(files),
            "host": host_id(),
            "contents": [] if files is None or self._ranks.are_children else _contents(files),
            "processors": [sorted(share) for share in shares(self._ranks.size)] if self._ranks.are_children else [],
        }
        program = torch.frombuffer(bytearray(to_bytes(shipment)), dtype=torch.uint8)
        self._ranks.load(Message("load", values, {"program": program}))

    def lead(self, program: LinkedProgram) -> LeaderProgram:
        """The program of all ranks; waits for the others."""
        return self._ranks.lead(program)

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()


def other_ranks(
    model: object, loading: LoadOptions, compiling: CompileOptions, device: torch.device
) -> ShippingRanks | None:
    """The ranks that the options ask for besides this process; None for one rank.

    Where a launcher has started this process as another rank than 0, it follows that one to its end.

    Raises:
        ValueError: the model cannot be run by several ranks, or the launcher has started another number of them.
        SystemExit: this process was another rank than 0.
    """
    size, launcher = compiling.world_size, loading.distributed_executor_backend
    launches = launcher == "external_launcher"
    stages = compiling.pipeline_parallel_size
    place = Place.of_environment() if launches else Place(0, size, size)
    asked = f"tensor_parallel_size={compiling.tensor_parallel_size}"
    if place.size != size:
        remedy = f"use tensor_parallel_size={place.size}"
        if stages > 1:
            remedy = f"{asked} with pipeline_parallel_size={stages} needs {size}"
        raise ValueError(f"the launcher has started {place.size} processes; {remedy}")
    if size == 1:
        return None
    if stages > 1:
        asked = f"pipeline_parallel_size={stages}" + (f" with {asked}" if size > stages else "")
    if not isinstance(model, str | os.PathLike):
        raise ValueError(f"{asked}: every rank reads the checkpoint, and a live module has none; pass its folder")
    backend: Backend | Literal[""] = ""
    is_npu = device.type == "npu" or compiling.target == "npu"
    if launcher == "ray":
        if is_npu:
            raise ValueError(
                f"{asked}: distributed_executor_backend='ray' is for CPUs so far; use 'mp', or torchrun with "
                "'external_launcher' where the NPUs are on several hosts"
            )
        check_ray("distributed_executor_backend='ray'")
    if stages > 1 and is_npu:
        raise ValueError(f"{asked} runs on CPUs only so far; use tensor_parallel_size alone, or device='cpu'")
    if device.type == "npu":
        backend = "hccl"
        _check_devices(asked, place.local_size, loading)
    elif compiling.target == "npu":
        backend = "gloo"
    if launcher != "ray" and place.local_size > (cores := len(os.sched_getaffinity(0))):
        raise ValueError(f"{asked} is more than the {cores} processors that this process may use; lower it")
    if stages > 1 and (layers := _number_of_layers(model)) is not None and layers < stages:
        raise ValueError(f"pipeline_parallel_size={stages} is more than the {layers} layers of the model; lower it")
    if launcher == "ray":
        join_ray("auto", log_to_driver=False)
    if place.rank == 0:
        launched = LaunchedRanks(place, stages=stages, backend=backend) if launches else None
        return ShippingRanks(model, loading, compiling, launched, backend)
    torch.set_num_threads(threads_per_rank(place.local_size))
    launched = LaunchedRanks(place, stages=stages, backend=backend)
    follow_first(launched, load_program, facts(torch.get_num_threads()) | _known(model, loading, compiling))
    raise SystemExit(0)


def _check_devices(asked: str, count: int, loading: LoadOptions) -> None:
    """Raise ``ValueError`` where the ranks of this host cannot have an NPU each, or may not start again."""
    found = torch.npu.device_count()  # type: ignore[attr-defined]
    if count > found:
        raise ValueError(
            f"{asked}: {count} ranks on this host need a device each, and it has {found}; lower it, or name more in "
            f"{VISIBLE}"
        )
    if torch.device(loading.device).index if loading.device != "auto" else None:
        raise ValueError(
            f"{asked} with device={str(loading.device)!r}: each rank has a device of its own; use device='npu', and "
            f"name the devices in {VISIBLE}"
        )
    if loading.worker_restarts:
        raise ValueError(
            f"{asked}: worker_restarts={loading.worker_restarts} is for CPUs: the graphs of an NPU hold the "
            "communicator that they were compiled for; omit it, pagoda serve starts the engine anew"
        )


def _device(backend: Backend | Literal[""], launched: LaunchedRanks | None) -> torch.device:
    if backend != "hccl":
        return torch.device("cpu")
    return torch.device("npu", 0 if launched is None else launched.place.local_rank)


def on_devices(backend: Backend | Literal[""], size: int) -> dict[str, Any]:
    """Arguments of ``Ranks`` for ranks that start as child processes and have devices."""
    if not backend:
        return {}
    devices = []
    if backend == "hccl":
        devices = visible_devices(torch.npu.device_count(), os.environ)  # type: ignore[attr-defined]
    return {
        "command": (*COMMAND, backend),
        "environment": partial(environment_of, devices=devices),
        "meet": partial(meet_on_devices, backend=backend),
    }


def load_program(message: Message, group: RankGroup) -> Program:
    """Make this rank's part of the program that rank 0 sent.

    Args:
        message: of kind ``"load"``, from ``ShippingRanks``.
        group: all ranks.

    Raises:
        ValueError: the checkpoint is not the one that rank 0 reads.
    """
    values = message.values
    if os.path.isabs(values["model"]) and not os.path.exists(values["model"]):
        raise ValueError(
            f"{values['model']!r} is not on host {socket.gethostname()}; give all hosts the checkpoint at that path"
        )
    if values["processors"]:  # Rank 0 is the user's process, which stays where it may run.
        bind(set(values["processors"][group.rank]))
    shipment = from_bytes(memoryview(message.tensors["program"].numpy().data), Shipment)
    device: torch.device = getattr(group, "device", torch.device("cpu"))
    if shipment.sources is None:
        module = load_model(values["model"], values["dtype"], values["trust_remote_code"], torch.device("cpu"))
        return program_of_rank(shipment, group.rank, None, module, device)
    files = checkpoint_files(values["model"], values["dtype"])
    if files is not None and values["host"] != host_id():
        same = _contents(files) == values["contents"]
    else:
        same = files is not None and _states(files) == values["files"]
    if files is None or not same:
        raise ValueError(
            f"the files of {values['model']!r} are not those that rank 0 reads; copy them, or start again"
        )
    return program_of_rank(shipment, group.rank, files, None, device)


def _states(files: CheckpointFiles) -> Sequence[Sequence[int]]:
    """What the system says of the files: another one, or one that was written, differs."""
    stats = map(os.stat, files.weights)
    return [[stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns] for stat in stats]


def _contents(files: CheckpointFiles) -> Sequence[Sequence[int | str]]:
    """What copies of the files have in common: their sizes, and a digest of their beginnings and of samples."""
    found: list[list[int | str]] = []
    for path in files.weights:
        size = os.path.getsize(path)
        digest = hashlib.blake2b(digest_size=16)
        with open(path, "rb") as file:
            for at in range(0, size, max(size // _SAMPLES, _SAMPLE_BYTES)):
                file.seek(at)
                digest.update(file.read(_SAMPLE_BYTES))
        found.append([size, digest.hexdigest()])
    return found


def _known(model: object, loading: LoadOptions, compiling: CompileOptions) -> dict[str, str]:
    """What all processes of a launcher have been asked for."""
    return {
        "model": os.path.basename(str(model)),
        "options of loading": repr(loading),
        "pipeline_parallel_size": str(compiling.pipeline_parallel_size),
    }


def _number_of_layers(model: str | os.PathLike[str]) -> int | None:
    """The layers that the configuration in a checkpoint's folder names; None where it cannot be told."""
    try:
        config = json.loads(Path(model, "config.json").read_text())
    except (OSError, ValueError):
        return None
    texts = [config, config.get("text_config") or {}]
    found = [text[name] for text in texts for name in ("num_hidden_layers", "n_layer", "n_layers") if name in text]
    return int(found[0]) if found else None
