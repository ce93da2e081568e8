"""``distributed_executor_backend``: processes of a launcher that run a script, and what is refused before."""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_pagoda import LLM, SamplingParams, cli, shipping
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.load_options import LoadOptions

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

_COMMAND = (
    *("-m", "torch_pagoda", "generate", str(EXAMPLE), "-p", "def f", "--temperature", "0", "--max-tokens", "8"),
    *("--dtype", "float32", "-tp", "2", "--distributed-executor-backend", "external_launcher"),
)


@pytest.mark.parametrize(
    "size, options, told",
    [
        ("2", {"tensor_parallel_size": 4, **BACKEND}, "has started 2 processes; use tensor_parallel_size=2"),
        ("2", BACKEND, "has started 2 processes; use tensor_parallel_size=2"),
        (None, {"tensor_parallel_size": 2, **BACKEND}, "needs RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the env"),
        (
            None,
            {"distributed_executor_backend": "ax"},
            "'ax' is not known; use one of 'mp', 'external_launcher', 'ray'",
        ),
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


COMMAND_OPTIONS = ("--distributed-executor-backend", "external_launcher")


def place(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    values = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("version", "options", "told"),
    [
        (None, {}, "distributed_executor_backend='ray' needs Ray; install it: pip install 'torch-pagoda[fleet]'"),
        ("2.59.0", {}, "needs Ray from 2.60 to below 2.62, and 2.59.0 is installed"),
        (
            "2.61.1",
            {"target": "npu"},
            "tensor_parallel_size=2: distributed_executor_backend='ray' is for CPUs so far",
        ),
    ],
)
def test_ray_is_refused_where_it_cannot_work(
    monkeypatch: pytest.MonkeyPatch, version: str | None, options: dict[str, Any], told: str
) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    monkeypatch.setattr(shipping, "join_ray", lambda *_, **__: pytest.fail("joined"))
    with pytest.raises(ValueError, match=re.escape(told)):
        LLM("/no/such/model", tensor_parallel_size=2, distributed_executor_backend="ray", **options)


def test_ray_reserves_the_threads_of_each_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And ranks whose working folders are others get the whole path of the checkpoint."""
    launches: list[Any] = []

    def ranks(size: int, *, launch: Any, **options: Any) -> Any:
        launches.append(launch)
        return SimpleNamespace(pids=[7] * (size - 1))

    monkeypatch.setattr(shipping, "Ranks", ranks)
    monkeypatch.setattr(shipping, "RayRanks", lambda *terms: terms)
    (tmp_path / "a-model").mkdir()
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    monkeypatch.setattr(shipping, "threads_per_rank", lambda size: before + 1)
    compiling = CompileOptions(tensor_parallel_size=2, pipeline_parallel_size=2)
    try:
        made = shipping.ShippingRanks("a-model", LoadOptions(distributed_executor_backend="ray"), compiling, None)
    finally:
        torch.set_num_threads(before)
    (launch,) = launches
    assert launch() == (4, 2, before + 1, {"CPU": before + 1}, shipping.load_program)
    assert made._model == str(tmp_path / "a-model")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("serve", "-dp", "2"), "--data-parallel-size 2: a launcher starts the ranks of one engine"),
        (("bench", "startup"), "a launcher starts each process once, and this starts several; use bench latency"),
        (("generate", "-p", "x", "-tp", "4"), "the launcher has started 2 processes; use tensor_parallel_size=2"),
    ],
)
def test_commands_refuse_what_cannot_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    place(monkeypatch, "0")
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "/no/such/model", *COMMAND_OPTIONS])
    assert ended.value.code == 2 and told in capsys.readouterr().err


def test_several_engines_are_not_for_ray(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "-dp", "2", "/no/such/model", "--distributed-executor-backend", "ray"])
    assert ended.value.code == 2
    assert "-parallel-size 2: with Ray it is for the ranks of one engine; use pagoda fleet" in capsys.readouterr().err


def test_only_rank_0_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[tuple[str, dict[str, Any]]] = []

    def follow(model: str, tokenizer: str | None, **options: Any) -> None:
        followed.append((model, options))
        raise SystemExit(0)

    monkeypatch.setattr("torch_pagoda.llm.LLM", follow)
    monkeypatch.setattr("torch_pagoda.cli.serving.Glue", lambda *_: pytest.fail("rank 1 serves"))
    place(monkeypatch, "1")
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "a-model", "-tp", "2", *COMMAND_OPTIONS])
    ((model, options),) = followed
    assert ended.value.code == 0 and model == "a-model" and options["tensor_parallel_size"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("is_command", [False, True])
def test_the_first_leads_and_the_others_follow_and_exit(is_command: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *(_COMMAND if is_command else ("-c", _SCRIPT))],
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
    text = expected[0].outputs[0].text
    if is_command:
        assert text in outputs[0] and outputs[1] == ""
    else:
        assert outputs == [f"2 {text}\n", "SystemExit 0\n"]
    assert [process.returncode for process in processes] == [0, 0]
