"""The passes that edit a static graph of the graph engine behind torchair's AOTAutograd."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..in_place import write_rows_in_place
from ..schedules.prefetches import counted_fetches
from ..schedules.schedule_options import leave_out
from ..schedules.side_branches import counted_branches
from .stream_labels import label_branches
from .super_kernel_scopes import counted_super_kernels, mark_super_kernels
from .weight_prefetch import fetch_weights

_COUNTED = {"streams": counted_branches, "prefetch": counted_fetches, "super_kernels": counted_super_kernels}


def noted_schedules(graph: fx.Graph) -> list[str]:
    """The schedules that notes on the nodes of a graph ask for."""
    return [name for name, counted in _COUNTED.items() if counted(graph)]


class WriteRowsAndSchedule:
    """``write_rows_in_place``, then what the notes of schedules ask for, as a ``post_grad_custom_pre_pass``.

    Args:
        dropped: schedules that are left out, and why; one that a graph cannot follow is noted there.
    """

    def __init__(self, dropped: dict[str, str] | None = None) -> None:
        self._dropped = {} if dropped is None else dropped

    def __call__(self, gm: fx.GraphModule, example_inputs: Any = None, config: Any = None) -> None:
        write_rows_in_place(gm, example_inputs, config)
        place = {"streams": label_branches, "prefetch": fetch_weights, "super_kernels": mark_super_kernels}
        for name in noted_schedules(gm.graph):
            if name not in self._dropped and (reason := place[name](gm)):
                leave_out(name, reason, self._dropped)
