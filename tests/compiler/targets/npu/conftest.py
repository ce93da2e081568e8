"""Every graph that gets a schedule here is held against what it was before."""

from __future__ import annotations

import pytest
from placed_schedules import checked_fetches, checked_prefetch_stream, checked_side_stream

from torch_pagoda.compiler.targets.npu.aclgraph import aclgraph_route
from torch_pagoda.compiler.targets.npu.ge import scheduled


@pytest.fixture(autouse=True)
def checked_schedules(monkeypatch):
    monkeypatch.setattr(aclgraph_route, "use_side_stream", checked_side_stream)
    monkeypatch.setattr(aclgraph_route, "use_prefetch_stream", checked_prefetch_stream)
    monkeypatch.setattr(scheduled, "fetch_weights", checked_fetches)
