"""Ranks of the selftest's exchanges that make a mistake: a stage of them, and run as a script, one of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torch_pagoda.npu_tools.selftest.collectives import take_part
from torch_pagoda.npu_tools.selftest.worker import Items, Progress
from torch_pagoda.rank import main
from torch_pagoda.runtime.parallel.device_group import DeviceGroup

FAULT = "FAULTY_EXCHANGES"
"""Environment variable: one of ``FAULTS``."""
SECONDS = 5.0
"""That ranks wait for each other."""


def ulp(found: torch.Tensor) -> torch.Tensor:
    """One number is the next one, unless all are integers."""
    if bool((found == found.round()).all()):
        return found
    made = found.clone()
    made.view(-1)[-1] = torch.nextafter(made.view(-1)[-1], torch.tensor(torch.inf, dtype=made.dtype))
    return made


def hang(found: torch.Tensor) -> torch.Tensor:
    """Nothing comes."""
    time.sleep(3600)
    return found


def die(found: torch.Tensor) -> torch.Tensor:
    """The process ends."""
    os.kill(os.getpid(), 9)
    return found


FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"ulp": ulp, "hang": hang, "die": die}


def stage(**asked: Any) -> Items:
    """The sums of ranks, one of which makes a mistake; an item for each."""
    from torch_pagoda.npu_tools.selftest import ranks

    ranks.COMMAND, ranks.EXCHANGE_SECONDS = (sys.executable, str(Path(__file__))), SECONDS
    run = ranks.stage(**asked)["all_reduce"]

    def run_with(fault: str, progress: Progress) -> dict[str, Any]:
        os.environ[FAULT] = fault
        return run(progress)

    return {fault: partial(run_with, fault) for fault in FAULTS}


if __name__ == "__main__":
    fault, reduce = FAULTS[os.environ[FAULT]], DeviceGroup.all_reduce
    DeviceGroup.all_reduce = lambda self, x: fault(reduce(self, x))  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:], lambda: take_part))
