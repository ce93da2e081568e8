"""Options of loading a model, importable by the command line without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .runtime.option import option

if TYPE_CHECKING:
    import torch

BACKENDS = ("mp", "external_launcher", "ray")
"""What can start ranks."""
MOST_SECONDS = 86_400


@dataclass(frozen=True)
class LoadOptions:
    """Options of loading a model.

    Attributes:
        dtype: ``"auto"`` (the checkpoint's, or the live module's), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: ``"auto"`` (an NPU if torch_npu reports one, else the CPU), ``"cpu"`` or ``"npu"``.
        generation_config: source of the parameters of requests without any: ``"auto"``, the generation config of the
            checkpoint (or live module); ``"vllm"``, ``SamplingParams()``; or a folder with such a file. Its
            temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens are read, and ``do_sample=False``
            as greedy. End tokens are the model's own in any case.
        trust_remote_code: run model code that comes with the checkpoint.
        gguf_file: name of the GGUF file in the folder or repository, as in transformers.
        distributed_executor_backend: what starts the processes that the parallel sizes ask for: ``"mp"``, this
            process does; ``"external_launcher"``, ``torchrun`` has started them with this script, and where the rank
            is not 0, the model follows rank 0 to its end and then raises ``SystemExit(0)``; ``"ray"``, Ray does, on
            the hosts of the cluster that this host belongs to.
        worker_restarts: how often, in ten minutes, the processes beside this one that the parallel sizes ask
            for start again after one of them failed; then what is under way ends with an error.
        step_timeout: seconds that these processes may take for one step; one that takes longer has failed.

    Raises:
        ValueError: an unknown dtype or device, or an unavailable NPU.
    """

    dtype: str | torch.dtype = option("auto", "auto, float32, bfloat16 or float16.")
    device: str | torch.device = option("auto", "auto, cpu or npu.")
    generation_config: str | os.PathLike[str] = "auto"
    trust_remote_code: bool = option(False, "Run code that comes with the checkpoint.")
    gguf_file: str | None = None
    distributed_executor_backend: str = option("mp", "What starts the ranks: mp, external_launcher (torchrun), ray.")
    worker_restarts: int | None = option(None, "Starts of other ranks in place of failed ones, in 10 minutes.")
    step_timeout: float = option(300.0, "Seconds after which a step of several ranks has failed.")

    def __post_init__(self) -> None:
        from .checkpoint.loading import resolve_dtype
        from .device import resolve_device

        resolve_dtype(self.dtype)
        resolve_device(self.device)
        backend = self.distributed_executor_backend
        if backend not in BACKENDS:
            known = ", ".join(map(repr, BACKENDS))
            raise ValueError(f"distributed_executor_backend={backend!r} is not known; use one of {known}")
        if self.worker_restarts is not None and (type(self.worker_restarts) is not int or self.worker_restarts < 0):
            raise ValueError(f"worker_restarts={self.worker_restarts!r} is not a number from 0; give one")
        if type(self.step_timeout) not in (int, float) or not 0 < self.step_timeout <= MOST_SECONDS:
            raise ValueError(
                f"step_timeout={self.step_timeout!r} is not a number of seconds from 0 to {MOST_SECONDS}; give one"
            )
