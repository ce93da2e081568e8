"""Options of ``pagoda serve`` for several engines and their events, refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from torch_pagoda.cli.serve_options import ServeOptions
from torch_pagoda.cli.serving import _check_engines


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (0, {}, "--data-parallel-size 0 is below 1"),
        (5, {}, "needs 5 processors, one for each rank, and this process may use 4"),
        (2, {"tensor_parallel_size": 4}, "needs 8 processors"),
        (2, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "needs 8 processors"),
    ],
)
def test_more_engines_than_processors_are_refused(
    count: int, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    with pytest.raises(ValueError, match=message):
        _check_engines(count, options)
    _check_engines(4, {})
    _check_engines(2, {"pipeline_parallel_size": 2})
    _check_engines(1, {"tensor_parallel_size": 8})  # whose own check names the ranks


def test_events_are_asked_for_by_vllms_keys() -> None:
    asked = ServeOptions(kv_events_config='{"enable_kv_cache_events": true, "endpoint": "tcp://*:5600"}')
    assert asked.kv_events({}) == {"enable_kv_cache_events": True, "endpoint": "tcp://*:5600"}
    assert ServeOptions().kv_events({}) is None
    assert ServeOptions(kv_events_config='{"enable_kv_cache_events": false}').kv_events({}) is None
    with pytest.raises(ValueError, match="--kv-events-config needs prefix caching"):
        asked.kv_events({"enable_prefix_caching": False})
    with pytest.raises(ValueError, match="--kv-events-config: unknown keys port"):
        ServeOptions(kv_events_config='{"port": 1}').kv_events({})
    with pytest.raises(ValueError, match="--kv-events-config"):
        ServeOptions(kv_events_config="[]").kv_events({})
