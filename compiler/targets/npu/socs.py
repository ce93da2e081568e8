"""Published figures of Ascend chips: how fast they read memory and multiply at best.

Sources, by the letter in the comment of each row:

a. ``platform_config/<name>.ini`` of CANN 8.1.RC1 (an installed CANN has these files in ``<arch>-linux/data``): number
   of cube cores, their frequency, size of the memory. A cube core multiplies 16 × 16 × 16 numbers of 16 bits a cycle.
b. MindStudio's msmodeling, https://github.com/Ascend/msmodeling, ``tensor_cast/device.py``: memory and bandwidth of
   Atlas 800 A2 and of one die of A3. It names their grades by memory and by the peak of cube and vector cores
   together (376T, 313T, 280T); its bf16 peaks, 353.9, 294.9 and 245.8 TFLOP/s, are what (a) gives.
c. CANN's guide to moving operators between chips, https://gitcode.com/cann/ops-nn,
   ``docs/zh/develop/cross_platform_migration_guide.md``, with issue 6033 there, which quotes the white paper of the
   950's architecture: 1.6 TB/s for Atlas A2 and for 950PR; 32 cube cores at 1.65 GHz and 128 GB for the larger 950PR.
d. https://gitcode.com/Ascend/DrivingSDK, ``.agent/skills/performance-predict``: 432 TFLOP/s and 4 TB/s for 950DT,
   and the vector cores of 910B3. The 950DT's
   144 GB: https://www.besthub.dev/articles/why-huawei-s-ascend-950-pr-and-dt-have-different-names-the-technical-
   rationale-d1c4387cc991.
e. Press about the Atlas 300I Duo, two 310P with 408 GB/s together: https://www.elektronikpraxis.de/huawei-zeigt-mit-
   der-atlas-300i-duo-dass-der-weg-zur-unabhaengigkeit-von-nvidia-begonnen-hat-a-deb1ef4fcfe19c3dc4d27c214cd519d1. No
   page of the vendor was found.
f. The section ``SoCInfo`` of these files, as people quote it: cores and L2 of 910B1, 910B2 and 910B4
   (https://github.com/huawei-csl/pto-dsl, guide to matrix products, for the latter two). Of the other chips none was
   found. Their section ``AICoreMemoryRates`` of 910B1 says 110 bytes a cycle for each core that reads the L2; the
   cores of the others are of the same architecture.

What no source says is None, and a chip that none names is not in the table.
"""

from __future__ import annotations

from dataclasses import dataclass

# Of a cube core: 16 × 16 × 16 products and as many sums.
_FLOPS_PER_CYCLE = 2 * 16**3
_L2_BYTES_PER_CYCLE = 110  # f
_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class Chip:
    """One Ascend chip, or the die of one that is a device of its own.

    Attributes:
        name: of the SoC, as ``torch.npu.get_device_name()`` gives it; of several, what their names begin with.
        bandwidth: of its memory, bytes per second; None when unknown.
        cube_cores: None when unknown.
        frequency: of the cube cores, Hz.
        memory: bytes; None when unknown.
        vector_cores: None when unknown.
        l2: size of the L2 cache, bytes; None when unknown.
    """

    name: str
    bandwidth: float | None
    cube_cores: int | None
    frequency: float
    memory: int | None
    vector_cores: int | None = None
    l2: int | None = None

    @property
    def peak(self) -> float | None:
        """Operations per second of dense products in half precision (bf16, or fp16 on 310P); None when unknown."""
        return None if self.cube_cores is None else self.cube_cores * self.frequency * _FLOPS_PER_CYCLE

    @property
    def l2_bandwidth(self) -> float | None:
        """Bytes per second that all cube cores together read from the L2 cache; None where that is unknown."""
        if self.l2 is None or self.cube_cores is None:
            return None
        return self.cube_cores * self.frequency * _L2_BYTES_PER_CYCLE


_EXACT = (
    Chip("Ascend910B1", 1.6e12, 24, 1.85e9, 64 * _GIB, 48, 192 * _MIB),  # a; bandwidth c; L2 f
    Chip("Ascend910B2", 1.6e12, 24, 1.80e9, 64 * _GIB, 48, 192 * _MIB),  # a; bandwidth b (376T, 64G), c; L2 f
    Chip("Ascend910B3", 1.6e12, 20, 1.80e9, 64 * _GIB, 40),  # a; bandwidth b (313T, 64G); vector cores d, c
    Chip("Ascend910B4", 0.8e12, 20, 1.50e9, 32 * _GIB, 40, 96 * _MIB),  # a; bandwidth b (280T, 32G); L2 f
    Chip("Ascend910_9391", 1.6e12, 24, 1.85e9, 64 * _GIB),  # a; bandwidth b; one die of two
    Chip("Ascend910_9362", 1.6e12, 20, 1.50e9, None),  # a; bandwidth b; they differ about the memory
    Chip("Ascend310P3", 204e9, 8, 1.06e9, 24 * 10**9),  # a; bandwidth e
)
# Grades whose names the sources do not tell apart; the best of them, so that times stay lower bounds.
_FAMILIES = (
    Chip("Ascend910_93", 1.6e12, None, 0.0, None),  # b
    Chip("Ascend950PR", 1.6e12, 32, 1.65e9, 128 * 10**9),  # c
    Chip("Ascend950DT", 4.0e12, 32, 1.65e9, 144 * 10**9),  # d; cores and frequency of the same die, c
)


def chip(soc: str) -> Chip | None:
    """The figures that are known of a SoC; None for one that no source names.

    Args:
        soc: its whole name, such as ``Ascend910B3``. A longer name is another chip: 910B4-1 has twice the memory of
            910B4.
    """
    for entry in _EXACT:
        if soc == entry.name:
            return entry
    return next((entry for entry in _FAMILIES if soc.startswith(entry.name)), None)
