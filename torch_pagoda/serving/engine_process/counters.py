"""Statistics over engine restarts: counters continue where the previous engine stopped."""

from __future__ import annotations

from collections.abc import Mapping

from ...runtime.block_store.traffic import FIGURES as STORE_FIGURES
from ...runtime.engine.step_sizes import FIGURES
from ...runtime.engine.synchronous_steps import REASONS
from ...runtime.speculation.drafting import ACCEPTED_BY_PLACE, LIMITS

COUNTERS = frozenset(
    {
        *("steps", "computed_tokens", "generated_tokens", "prompt_tokens", "cached_tokens", "failed"),
        *("finished_stop", "finished_length", "finished_cancelled", "finished_timeout", "finished_error"),
        *("preemptions", "swaps", "evictions", "copies_on_write", "blocks_moved"),
        *("blocks_swapped_out", "blocks_swapped_in", "prefix_query_tokens", "prefix_hit_tokens"),
        *("state_slots_evicted", "model_seconds", "total_seconds"),
        *FIGURES.values(),
        *("steps_ahead", "rank_restarts", "collective_seconds"),
        *(f"synchronous_steps_{reason}" for reason in REASONS),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        *ACCEPTED_BY_PLACE,
        *("draft_rows_filled", "drafters_failed"),
        *(f"undrafted_{reason}" for reason in LIMITS),
        *STORE_FIGURES,
    }
)
"""Keys of ``Engine.stats`` that only grow."""

_OF_THE_LIVING = (
    *("running", "queue_length", "queue_tokens", "blocks_used", "host_blocks_used", "state_slots_used"),
)
"""Keys that are 0 while no engine runs."""


class Counters:
    """Adds the totals of former engines to those of the running one."""

    def __init__(self) -> None:
        self.restarts = 0
        self._former: dict[str, int | float] = {}
        self._before: dict[str, int | float] = {}
        self._latest: dict[str, int | float] = {}
        self._sum: dict[str, int | float] = {"restarts": 0}

    @property
    def stats(self) -> Mapping[str, int | float]:
        """All statistics, and ``restarts``."""
        return self._sum

    def update(self, stats: Mapping[str, int | float]) -> None:
        """Record the statistics of the running engine."""
        self._latest = dict(stats)
        former = self._former
        self._sum = {name: value + former.get(name, 0) for name, value in stats.items()}
        self._sum["restarts"] = self.restarts

    def end(self) -> None:
        """Note that the engine has ended; the next one counts from 0."""
        if self._latest:
            self._before = dict(self._former)
        for name in COUNTERS & self._latest.keys():
            self._former[name] = self._former.get(name, 0) + self._latest[name]
        self._latest = {}
        for name in _OF_THE_LIVING:
            if name in self._sum:
                self._sum[name] = 0

    def resume(self) -> None:
        """Take back the latest ``end``: the same engine is heard again, and counts on."""
        self._former = dict(self._before)

    def restart(self) -> None:
        """Count the start of a new engine."""
        self.restarts += 1
        self._sum["restarts"] = self.restarts
