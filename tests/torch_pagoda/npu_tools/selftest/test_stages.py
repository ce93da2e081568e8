"""The stages on a stand-in for a device, with mistakes that they should find."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import selftest_stand_in
import torch
from transformers import PreTrainedModel

from torch_pagoda.compiler import UnsupportedModel
from torch_pagoda.compiler.verify.self_check import Reference, Schedule, reference_of_model
from torch_pagoda.npu_tools.selftest import comparisons as comparisons_file
from torch_pagoda.npu_tools.selftest import graphs as graphs_file
from torch_pagoda.npu_tools.selftest import model as model_file
from torch_pagoda.npu_tools.selftest import operators as operators_file
from torch_pagoda.npu_tools.selftest.comparisons import COMPARISONS, Comparison, chosen
from torch_pagoda.npu_tools.selftest.device import Device
from torch_pagoda.npu_tools.selftest.graphs import graph_items
from torch_pagoda.npu_tools.selftest.model import Asked, _device
from torch_pagoda.npu_tools.selftest.operators import operator_items
from torch_pagoda.npu_tools.selftest.passes import pass_items
from torch_pagoda.npu_tools.selftest.worker import Items

from legal_models import build_legal_model

ROOT = Path(__file__).parents[4]
ASKED = Asked("nowhere", max_num_seqs=3, max_num_batched_tokens=16, block_size=16)


def silent(found: dict[str, Any]) -> None:
    """Takes what an item says under way."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_legal_model("llama", dtype=torch.bfloat16, num_hidden_layers=1)


@pytest.fixture(scope="module")
def reference(model: PreTrainedModel) -> Reference:
    return reference_of_model(model)


@contextmanager
def device(**mistakes: str) -> Iterator[Device]:
    """A stand-in with mistakes, by operator."""
    running = selftest_stand_in._Running()
    before = len(selftest_stand_in._libraries)
    for operator, kind in mistakes.items():
        selftest_stand_in._bend(operator, selftest_stand_in.MISTAKES[kind], running)
    yield Device(torch.device("cpu"), "Ascend910B3", stand_in="a toy", running=running.entered)
    while len(selftest_stand_in._libraries) > before:
        selftest_stand_in._libraries.pop()._destroy()


def wrong(items: Items) -> dict[str, str]:
    """Item → why it is wrong, of those that are."""
    found = {name: run(silent) for name, run in items.items()}
    assert json.dumps(found, allow_nan=False)
    return {name: result["wrong"] for name, result in found.items() if result["wrong"]}


@pytest.fixture(scope="module")
def items(model: PreTrainedModel) -> Callable[[Device], Items]:
    """The items of the operators, whose calls are collected once."""
    asked_of: list[Device] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(operators_file, "SCHEDULE", Schedule((41, 9, 20), (19, 5, 6), 16, decoded=3))
        made = operator_items(model, _Later(asked_of), ASKED)  # type: ignore[arg-type]

    def on(device: Device) -> Items:
        asked_of[:] = [device]
        return made

    return on


class _Later:
    """A device that is known when it is used."""

    def __init__(self, known: list[Device]) -> None:
        self._known = known
        self.soc = "Ascend910B3"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._known[0], name)


def test_every_operator_of_the_graphs_is_compared(items: Callable[[Device], Items]) -> None:
    with device() as right:
        made = items(right)
        assert wrong(made) == {}
    operators = {name.partition("(")[0] for name in made}
    assert operators >= {
        *("npu_rms_norm", "npu_add_rms_norm", "npu_linear", "npu_rotary_mul", "npu_scatter_pa_kv_cache"),
        *("npu_fused_infer_attention_score", "npu_swiglu", "aten.embedding"),
    }
    steps = {name.split("), ")[1].split(",")[0] for name in made}
    assert steps == {"30 tokens of 3", "31 tokens of 3", "decode of 3", "decode of 1"}
    assert any("FRACTAL_NZ" in name for name in made)


def test_a_graph_that_cannot_be_lowered_does_not_keep_the_other_from_being_compared(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower = operators_file._lowered

    def refused(captured: Any, asked: Asked, soc: str, mode: str) -> Any:
        if mode == "ge":
            raise UnsupportedModel("no converter")
        return lower(captured, asked, soc, mode)

    monkeypatch.setattr(operators_file, "SCHEDULE", Schedule((5, 5, 5), (1, 1, 1), 16, decoded=1))
    monkeypatch.setattr(operators_file, "_lowered", refused)
    with device() as right:
        made = operator_items(model, right, ASKED)
        assert made["lowering for ge"](silent) == {"wrong": "no converter"}
    assert any(name.startswith("npu_linear(") for name in made)


def decode(items: Items) -> Items:
    """Those of steps in which three sequences decode."""
    return {name: run for name, run in items.items() if "decode of 3" in name}


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        *(("npu_linear", kind) for kind in ("off", "swapped", "nan")),
        ("npu_swiglu", "off"),
        ("npu_fused_infer_attention_score", "swapped"),
        ("npu_rotary_mul", "scale"),
    ],
)
def test_an_operator_that_is_bent_is_wrong_and_no_other(
    items: Callable[[Device], Items], operator: str, kind: str
) -> None:
    with device(**{operator: kind}) as bent:
        made = decode(items(bent))
        found = wrong(made)
    assert set(found) == {name for name in made if name.startswith(f"{operator}(")} and found
    assert all(reason.startswith("result") for reason in found.values())


def test_an_operator_that_writes_elsewhere_is_wrong(items: Callable[[Device], Items]) -> None:
    with device(npu_scatter_pa_kv_cache="swapped") as bent:
        found = wrong(decode(items(bent)))
    assert found and all(name.startswith("npu_scatter_pa_kv_cache(") for name in found)
    assert all(reason.startswith("key_cache differs by") for reason in found.values())


def test_an_operator_that_raises_says_what_the_device_said(items: Callable[[Device], Items]) -> None:
    with device(npu_swiglu="no-memory") as bent:
        run = next(run for name, run in items(bent).items() if name.startswith("npu_swiglu("))
        with pytest.raises(RuntimeError, match="NPU out of memory"):
            run(silent)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ({"block_size": 7}, "7"),
        ({"quantization": "int3"}, "int3"),
        ({"kv_cache_dtype": "int3"}, "int3"),
        ({"passes": {"x": []}}, "x"),
    ],
)
def test_mistakes_in_what_is_asked_are_found_in_the_first_stage(
    monkeypatch: pytest.MonkeyPatch, mistake: dict[str, Any], words: str
) -> None:
    with device() as right:
        monkeypatch.setattr(model_file, "open_device", lambda asked: right)
        assert list(model_file.stage(model="nowhere")) == ["device", "model"]
        with pytest.raises(ValueError, match=words):
            model_file.stage(model="nowhere", **mistake)


def test_stages_have_no_more_threads_than_the_control_group_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(model_file, "limit_threads", lambda: called.append("limit"))
    monkeypatch.setattr(model_file, "load_model", lambda *_: called.append("load"))
    model_file.load(ASKED, torch.device("cpu"))
    assert called == ["limit", "load"]


def test_the_device_item() -> None:
    with device() as right:
        found = _device(right)
    assert found["wrong"] == "" and found["stand_in"] == "a toy" and found["facts"]["lowered for"] == "Ascend910B3"
    assert found["largest"] == 0


@pytest.mark.parametrize(
    ("spoil", "words"), [(lambda x: x * math.nan, "differs by nan"), (lambda x: x + 1, "differs by 1")]
)
def test_a_product_that_is_not_exact_is_wrong(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    run, count = Device.run, iter(range(2))
    monkeypatch.setattr(Device, "run", lambda self, call: spoil(run(self, call)) if next(count) else run(self, call))
    with device() as spoiled:
        found = _device(spoiled)
    assert words in found["wrong"] and json.dumps(found, allow_nan=False)


# The model, pass by pass


@pytest.mark.slow
def test_the_first_pass_that_breaks_is_named(model: PreTrainedModel, reference: Reference) -> None:
    said: list[dict[str, Any]] = []
    with device(npu_swiglu="nan") as bent:
        found = pass_items(model, reference, bent, ASKED)["pass by pass"](said.append)
    assert found["wrong"].startswith("lower_npu_activations is the first pass that breaks the model: ")
    names = [check["name"] for check in found["checks"]]
    assert [check["name"] for check in found["checks"] if check["reason"]] == ["lower_npu_activations"]
    assert [len(each["checks"]) for each in said] == list(range(1, len(names) + 1)), "each is said when it is known"


def test_the_model_itself_is_compared(model: PreTrainedModel, reference: Reference) -> None:
    with device() as right:
        item = pass_items(model, reference, right, ASKED)["the model as transformers runs it"]
        assert item(silent)["wrong"] == ""
        table = model.get_input_embeddings().weight  # type: ignore[union-attr]
        with torch.no_grad():
            kept = table.clone()
            table[3:] = table[3:].roll(1, 0)
        found = item(silent)
        with torch.no_grad():
            table.copy_(kept)
    assert "logits differ from the CPU's by" in found["wrong"]


# Ways to run the graph


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Makes one comparison; a size can be wrong."""
    from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import AclGraphs
    from torch_pagoda.compiler.targets.npu.ge.ge_route import GeGraphs

    monkeypatch.setattr(graphs_file, "_DECODED", 2)
    monkeypatch.setattr(graphs_file, "_PROMPT", 20)

    def run(
        model: PreTrainedModel, reference: Reference, *comparison: Comparison, size: int = 0, **mistakes: str
    ) -> dict[str, Any]:
        for route in (AclGraphs, GeGraphs):  # put back after the test
            monkeypatch.setattr(route, "_compile", route._compile)
        monkeypatch.setattr(GeGraphs, "_compile_static", GeGraphs._compile_static)
        selftest_stand_in._stand_for_graphs(size)
        monkeypatch.setattr(comparisons_file, "COMPARISONS", comparison)
        with device(**mistakes) as used:
            (item,) = graph_items(model, reference, used, ASKED).values()
            return item(silent)

    return run


CAPTURED = next(each for each in COMPARISONS if each.name == "captured graphs")


@pytest.mark.slow
def test_sizes_are_compared_and_both_sides_take_turns(
    model: PreTrainedModel, reference: Reference, graphs: Callable[..., dict[str, Any]]
) -> None:
    found = graphs(model, reference, CAPTURED)
    assert found["wrong"] == "" and json.dumps(found, allow_nan=False)
    assert (found["off"]["codegen"], found["on"]["codegen"]) == ("none", "aclgraph")
    sizes = [size["name"] for size in found["on"]["sizes"]]
    assert sizes[0] == "decode steps of 3 tokens" and sizes[-1] == "mixed steps of 16 tokens"
    assert found["same_tokens"] == found["sequences"] == 3
    assert all(len(found[name]["milliseconds_by_turn"]) == 3 for name in ("off", "on"))
    assert found["on"]["error"] <= found["on"]["limit"] and math.isfinite(found["times"])


def test_a_wrong_size_is_named(
    model: PreTrainedModel, reference: Reference, graphs: Callable[..., dict[str, Any]]
) -> None:
    found = graphs(model, reference, CAPTURED, size=2)
    assert found["wrong"].startswith("with captured graphs decode steps of 2 tokens are left out: its logits differ")
    reasons = {size["name"]: size["reason"] for size in found["on"]["sizes"]}
    assert next(iter(reasons)) == "decode steps of 3 tokens" and list(reasons)[-1] == "mixed steps of 16 tokens"
    assert [name for name, reason in reasons.items() if reason] == ["decode steps of 2 tokens"]
    assert found["same_tokens"] == 3, "its steps run at another size"


@pytest.mark.parametrize(
    "name",
    [
        "static decode graphs",
        pytest.param("FRACTAL_NZ", marks=pytest.mark.slow),
        pytest.param("super kernels of the graph engine", marks=pytest.mark.slow),
    ],
)
def test_graphs_of_fixed_sizes_and_turned_matrices_are_compared(
    model: PreTrainedModel, reference: Reference, graphs: Callable[..., dict[str, Any]], name: str
) -> None:
    comparison = dataclasses.replace(chosen([name])[0], by_default=True)
    found = graphs(model, reference, comparison)
    assert found["wrong"] == "" and found["same_tokens"] == found["sequences"] == 3
    expected = comparison.on["codegen"]
    assert found["off"]["codegen"] == found["on"]["codegen"] == expected
    sizes = [size["name"] for size in found["on"]["sizes"]]
    assert any(each.startswith("decode steps of 3") for each in sizes)
    assert found["on"]["limits"] == found["off"]["limits"], "what is asked for is placed"


def test_decode_steps_over_int8_caches_are_compared_by_the_kernel_that_they_run_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llama = build_legal_model("llama", dtype=torch.bfloat16, num_hidden_layers=1)
    asked = dataclasses.replace(ASKED, block_size=32, kv_cache_dtype="int8")
    monkeypatch.setattr(operators_file, "SCHEDULE", Schedule((41, 9, 20), (19, 5, 6), 32, decoded=3))
    with device() as right:
        made = operator_items(llama, right, asked)
        assert wrong(made) == {}
    steps: dict[str, set[bool]] = defaultdict(set)
    for name in made:
        steps[name.partition("(")[0]].add("decode" in name.split("), ")[1])
    assert steps["npu_fused_infer_attention_score"] == {True}, "prompts gather"
    assert steps["npu_dynamic_quant"] == steps["npu_scatter_nd_update_"] == {True, False}


def test_comparisons_are_chosen_by_name() -> None:
    assert [each.name for each in chosen(["FRACTAL_NZ"])] == ["FRACTAL_NZ"]
    assert [each.name for each in chosen([])] == [each.name for each in COMPARISONS if each.by_default]
    with pytest.raises(ValueError, match="comparison 'nz' is unknown; use one of graph engine, captured graphs"):
        chosen(["nz"])


# The whole command


def check_report(report: dict[str, Any], out: str, page: str) -> None:
    """That of a run in which attention finds no memory and the activation is off by twice the limit."""
    by_operator: dict[str, set[str]] = {}
    for outcome in report["stages"]["operators"]:
        by_operator.setdefault(outcome["item"].partition("(")[0], set()).add(outcome["status"])
    assert by_operator.pop("npu_fused_infer_attention_score") == {"failed"}
    assert by_operator.pop("npu_swiglu") == {"wrong"}
    assert all(statuses == {"right"} for statuses in by_operator.values())
    first = report["first_wrong"]
    assert first["item"].startswith("npu_fused_infer_attention_score(")
    assert first["reason"].startswith("the device is out of memory; lower kv_cache_memory, num_blocks")
    assert "No Ascend device was used: selftest of llama" in out
    assert "<title>No Ascend device was used" in page


@pytest.mark.slow
def test_mistakes_are_found_by_the_whole_command(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "secret-model")
    mistakes = ("--mistake=npu_swiglu=off", "--mistake=npu_fused_infer_attention_score=no-memory")
    command = [sys.executable, str(ROOT / "tests/support/selftest_stand_in.py"), str(tmp_path / "secret-model")]
    command += ["--out", str(tmp_path), "--stage=operators", *mistakes]
    ended = subprocess.run(command, capture_output=True, text=True)
    text, page = (tmp_path / "report.json").read_text(), (tmp_path / "report.html").read_text()
    assert ended.returncode == 1
    check_report(json.loads(text), ended.stdout, page)
    assert "secret-model" not in text + page and str(tmp_path) not in text + page
