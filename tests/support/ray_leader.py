"""Rank 0 of models whose other ranks Ray starts; run as a script with the name of a function.

What that yields is printed as lines of JSON. It goes on when it has read a line.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

import ray
from fleets import PROMPTS

from torch_pagoda import LLM, SamplingParams
from torch_pagoda.runtime.parallel import ray_placement, ray_ranks

from served import MODEL

GREEDY = SamplingParams(max_tokens=24, temperature=0)
LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)


def model(**options: object) -> LLM:
    sizes = {"dtype": "float32", "max_model_len": 512, "block_size": 4}
    return LLM(str(MODEL), distributed_executor_backend="ray", verify="off", codegen="none", **sizes, **options)


def texts(llm: LLM, params: SamplingParams = GREEDY) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, params)]


def ranks() -> Iterator[object]:
    """Two ranks: their texts, then what becomes of a request while one is killed, and again with no restart left."""
    before = signal.getsignal(signal.SIGTERM)
    with model(tensor_parallel_size=2, worker_restarts=1) as llm:
        yield {"pids": pids(llm), "texts": texts(llm), "nodes": nodes(llm), "here": here()}
        assert signal.getsignal(signal.SIGTERM) == before
        expected = texts(llm, LONG)[0]
        text, error = kill_in_step(llm)
        yield {"is_exact": text == expected and error is None, "pids": pids(llm), "texts": texts(llm)}
        killed = pids(llm)
        yield {"error": kill_in_step(llm)[1], "killed": killed}


def kill_in_step(llm: LLM) -> tuple[str, str | None]:
    """The text and the error of a request during whose second step rank 1 is killed."""
    llm.submit(llm.tokenizer(PROMPTS[0]).input_ids, LONG)
    llm.step()
    os.kill(pids(llm)[0], signal.SIGKILL)
    outputs = []
    while llm.has_unfinished():
        outputs += llm.step()
    return outputs[-1].outputs[0].text, outputs[-1].outputs[0].error


def refusals_and_stages() -> Iterator[object]:
    """What is said where it cannot work, and the texts of two stages."""
    with mock.patch.object(ray_placement, "PLACE_SECONDS", 1.0):
        too_many = refusal(lambda: model(tensor_parallel_size=5))
    sys.modules["absent"] = module = ModuleType("absent")  # as if no other process found the package
    module.RayRank = type("RayRank", (), {"__module__": "absent", "begin": lambda self: None})  # type: ignore[attr-defined]
    with mock.patch.object(ray_ranks, "RayRank", module.RayRank):
        absent = refusal(lambda: model(tensor_parallel_size=2))
    found = importlib.metadata.version
    with mock.patch.object(
        importlib.metadata, "version", lambda name: "9.9" if name == "torch-pagoda" else found(name)
    ):
        other_version = refusal(lambda: model(tensor_parallel_size=2))
    yield {"too_many": too_many, "absent": absent, "other_version": other_version}
    with model(pipeline_parallel_size=2) as llm:
        yield {"texts": texts(llm), "pids": pids(llm)}


def refusal(make: Callable[[], LLM]) -> str:
    try:
        make()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def pids(llm: LLM) -> list[int]:
    return list(llm.runner.program.pids)


def nodes(llm: LLM) -> list[str]:
    """Ray's ids of the nodes of all ranks."""
    placement = llm.runner.program._ranks._launched._placement
    found = ray.util.placement_group_table(placement.group)["bundles_to_node_id"]
    return [found[bundle] for bundle in placement.bundles]


def here() -> str:
    return str(ray.get_runtime_context().get_node_id())


def main(name: str) -> None:
    for found in globals()[name]():
        print(json.dumps(found), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1])
