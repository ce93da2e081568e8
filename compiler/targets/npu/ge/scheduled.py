"""The passes that edit a static graph of the graph engine behind torchair's AOTAutograd."""

from __future__ import annotations

import logging
from typing import Any

from torch import fx

from ..in_place import write_rows_in_place
from ..prefetches import counted_fetches
from ..side_branches import counted_branches
from .stream_labels import label_branches
from .super_kernel_scopes import counted_super_kernels, mark_super_kernels
from .weight_prefetch import fetch_weights

log = logging.getLogger(__name__)


def write_rows_and_schedule(gm: fx.GraphModule, example_inputs: Any = None, config: Any = None) -> None:
    """``write_rows_in_place``, then what the notes of schedules ask for; with the arguments of a
    ``post_grad_custom_pre_pass``."""
    write_rows_in_place(gm, example_inputs, config)
    if counted_branches(gm.graph) and (reason := label_branches(gm)):
        log.warning("no branch runs on a second stream: %s", reason)
    if counted_fetches(gm.graph) and (reason := fetch_weights(gm)):
        log.warning("no weight is fetched before it is read: %s", reason)
    if counted_super_kernels(gm.graph) and (reason := mark_super_kernels(gm)):
        log.warning("no launches are fused into super kernels: %s", reason)
