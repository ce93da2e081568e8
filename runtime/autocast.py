"""Programs compute in the dtype that they were compiled for, whatever autocast the caller is under."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """A context in which operators on devices of this type keep the dtypes of their inputs."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
