from __future__ import annotations

from toy_state_program import ToyStateProgram

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.serving.engine_process.counters import COUNTERS, Counters

from toy_client import toy_engine
from toy_program import ToyProgram

GAUGES = {
    *("queue_length", "queue_tokens", "running", "blocks_total", "blocks_used", "blocks_cached", "blocks_free"),
    *("blocks_used_peak", "utilization", "internal_fragmentation", "prefix_hit_rate", "host_blocks_total"),
    *("host_blocks_used", "block_size"),
}


STATE_GAUGES = {f"state_slots_{name}" for name in ("total", "used", "cached", "free", "used_peak")}

OF_DRAFTS = {name for name in COUNTERS if name.startswith(("spec_decode", "draft", "undrafted"))}
OF_STORE = {name for name in COUNTERS if name.startswith("kv_store_")}
OF_RANKS = {"rank_restarts", "collective_seconds"}
AHEAD = {name for name in COUNTERS if name.startswith("synchronous_steps_")} | {"steps_ahead"}


def test_every_figure_is_known_to_grow_or_not_to() -> None:
    synchronous = COUNTERS - AHEAD - OF_RANKS - OF_STORE
    drafting = GAUGES | {"draft_length"}
    assert toy_engine(ToyStateProgram()).stats().keys() == synchronous | drafting | STATE_GAUGES
    assert toy_engine().stats().keys() == synchronous - {"state_slots_evicted"} | drafting
    ahead = Engine(ToyProgram(), num_blocks=8, async_scheduling=True)
    assert ahead.stats().keys() == COUNTERS - OF_RANKS - OF_STORE - OF_DRAFTS - {"state_slots_evicted"} | GAUGES


def test_totals_go_on_over_restarts_and_gauges_do_not() -> None:
    counters = Counters()
    assert counters.stats == {"restarts": 0}
    counters.update({"steps": 5, "running": 2, "blocks_total": 9})
    counters.update({"steps": 7, "running": 3, "blocks_total": 9})
    assert counters.stats == {"steps": 7, "running": 3, "blocks_total": 9, "restarts": 0}
    counters.end()
    assert counters.stats == {"steps": 7, "running": 0, "blocks_total": 9, "restarts": 0}
    counters.restart()
    assert counters.stats["restarts"] == 1
    counters.update({"steps": 0, "running": 0, "blocks_total": 8})
    counters.update({"steps": 2, "running": 1, "blocks_total": 8})
    assert counters.stats == {"steps": 9, "running": 1, "blocks_total": 8, "restarts": 1}
    counters.end()
    counters.end()
    counters.restart()
    counters.update({"steps": 1})
    assert counters.stats == {"steps": 10, "restarts": 2}


def test_a_dead_engine_has_no_states() -> None:
    counters = Counters()
    counters.update({"state_slots_used": 3, "state_slots_total": 8, "state_slots_evicted": 5})
    counters.end()
    assert counters.stats == {"state_slots_used": 0, "state_slots_total": 8, "state_slots_evicted": 5, "restarts": 0}
    counters.update({"state_slots_used": 1, "state_slots_total": 8, "state_slots_evicted": 2})
    assert counters.stats["state_slots_evicted"] == 7 and counters.stats["state_slots_used"] == 1
