"""``distributed_executor_backend``: processes of a launcher that run a script, and what is refused before."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torch_pagoda import LLM, SamplingParams

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-pydoc"
BACKEND = {"distributed_executor_backend": "external_launcher"}

_SCRIPT = f"""
import os
from torch_pagoda import LLM, SamplingParams
try:
    llm = LLM({str(EXAMPLE)!r}, dtype="float32", tensor_parallel_size=2, **{BACKEND!r})
except BaseException as end:
    print(type(end).__name__, end)
    raise
print(llm.stats()["ranks"], llm.generate("def f", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text)
"""


@pytest.mark.parametrize(
    "size, options, told",
    [
        ("2", {"tensor_parallel_size": 4, **BACKEND}, "has started 2 processes; use tensor_parallel_size=2"),
        ("2", BACKEND, "has started 2 processes; use tensor_parallel_size=2"),
        (None, {"tensor_parallel_size": 2, **BACKEND}, "needs RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the env"),
        (None, {"distributed_executor_backend": "ray"}, "'ray' is not known; use 'mp' or 'external_launcher'"),
        (None, {"worker_restarts": -1}, "worker_restarts=-1 is not a number from 0; give one"),
        (None, {"step_timeout": 0}, "step_timeout=0 is not a number of seconds from 0 to 86400; give one"),
        (None, {"step_timeout": float("nan")}, "step_timeout=nan is not a number of seconds"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, size: str | None, options: dict[str, Any], told: str
) -> None:
    values = {"RANK": "1", "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.delenv(name, raising=False)
        if size is not None and value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=told):
        LLM("/no/such/model", **options)


@pytest.mark.slow
def test_the_first_leads_and_the_others_follow_and_exit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _SCRIPT],
            env={**os.environ, **places, "RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    whole = LLM(EXAMPLE, dtype="float32")
    expected = whole.generate("def f", SamplingParams(temperature=0, max_tokens=8))
    assert outputs == [f"2 {expected[0].outputs[0].text}\n", "SystemExit 0\n"]
    assert [process.returncode for process in processes] == [0, 0]
