"""The Ascend chip that a graph is lowered for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

import torch


class Product(Enum):
    """Families of Ascend chips, by the prefix of the names of their members."""

    A2 = "Ascend910B"
    A3 = "Ascend910_93"
    A5 = "Ascend950"
    INFERENCE = "Ascend310P"


GRAPH_MODES = ("ge", "aclgraph")
DEFAULT_SOC = "Ascend910B3"
DEFAULT_BLOCK_SIZE = 128
OLDEST_CANN, NEWEST_CANN = "8.3", "9.1"
"""The first and the last release of CANN whose limits are known.

A machine without CANN, where nothing runs on a device, lowers for the last, which the supported torch_npu are
released for; a device whose CANN does not say its version gets the limits of the first.
"""


@dataclass(frozen=True)
class NpuTarget:
    """The machine, as far as lowering has to know it.

    Attributes:
        soc: name of the chip, such as ``Ascend910B3``, as ``torch.npu.get_device_name()`` gives it.
        block_size: tokens per block of the KV cache; operators bake it in.
        graph_mode: "ge", where torchair builds a graph of dense tensors; "aclgraph", where the calls are captured
            as they are and tensors keep their strides.
        cann: version of the CANN toolkit, such as ``9.1`` or ``9.1.0``; it decides which forms operators take.
        tried_on: a device on which forms of attention, and operators whose documents leave a question, run once
            before a graph has them, "npu"; "" tries none.
        float32_as: the dtype that float32 tensors count as when calls are held against the limits. For comparing
            numbers on a CPU in full precision; None on a device.

    Raises:
        ValueError: an unknown chip or graph mode, an invalid version of CANN, or a block size that is not positive.
    """

    soc: str = DEFAULT_SOC
    block_size: int = DEFAULT_BLOCK_SIZE
    graph_mode: str = "ge"
    cann: str = NEWEST_CANN
    tried_on: str = ""
    float32_as: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not any(self.soc.startswith(product.value) for product in Product):
            known = ", ".join(f"{product.value}*" for product in Product)
            raise ValueError(f"soc={self.soc!r} is not a known Ascend chip; it must be one of {known}")
        if self.graph_mode not in GRAPH_MODES:
            raise ValueError(f"graph_mode={self.graph_mode!r} is not one of {', '.join(map(repr, GRAPH_MODES))}")
        if not re.match(r"\d+\.\d+(\.|$)", self.cann):
            raise ValueError(
                f"cann={self.cann!r} is not a version of CANN; give its release, such as {NEWEST_CANN!r}"
            )
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size} is below 1; Ascend's attention reads 128 fastest")

    @property
    def product(self) -> Product:
        return next(product for product in Product if self.soc.startswith(product.value))

    @property
    def cann_release(self) -> tuple[int, int]:
        """Major and minor number of the CANN toolkit, to be compared."""
        major, minor = self.cann.split(".")[:2]
        return int(major), int(minor)

    def counted(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that limits are checked with."""
        return self.float32_as if dtype is torch.float32 and self.float32_as is not None else dtype
