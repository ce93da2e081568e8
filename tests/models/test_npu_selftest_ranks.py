"""The ranks stage in real processes that simulate NPUs, and ranks that make mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faulty_exchanges
import pytest
import torch
from simulated_npus import simulated_npus

from torch_pagoda import LLM
from torch_pagoda.npu_tools.selftest import ranks as ranks_file
from torch_pagoda.npu_tools.selftest.answers import answers
from torch_pagoda.npu_tools.selftest.journal import FAILED, RIGHT, WRONG, Journal, Outcome
from torch_pagoda.npu_tools.selftest.page import sections
from torch_pagoda.npu_tools.selftest.rank_items import BROKEN, KINDS, WAYS
from torch_pagoda.npu_tools.selftest.ranks import _compared, _Expected, stage
from torch_pagoda.npu_tools.selftest.report import make_report
from torch_pagoda.npu_tools.selftest.selftest import stages_of
from torch_pagoda.npu_tools.selftest.supervise import Stage, run_stage
from torch_pagoda.npu_tools.selftest.worker import Items

from legal_models import build_legal_model

SIMULATED = "torch_pagoda.npu_tools.selftest.device:simulated"
SIZES: dict[str, Any] = {"tensor_parallel_size": 2, "max_num_seqs": 3, "max_num_batched_tokens": 32, "block_size": 16}


def silent(found: dict[str, Any]) -> None:
    """Takes what an item says under way."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    build_legal_model("llama", num_hidden_layers=1).save_pretrained(made)
    return made


def items(folder: Path) -> Items:
    return stage(model=str(folder), device=SIMULATED, **SIZES)


def test_exchanges_of_two_processes(folder: Path) -> None:
    said: list[dict[str, Any]] = []
    found = items(folder)["all_reduce"](said.append)
    assert found["wrong"] == "" and json.dumps(found, allow_nan=False)
    assert [(each["dtype"], each["rows"]) for each in found["exchanges"]][::3] == [
        ("float32", 1),
        ("float16", 1),
        ("bfloat16", 1),
    ]
    assert all(each["repeats"] and each["in_order"] and each["microseconds"] > 0 for each in found["exchanges"])
    assert said[0] == {"doing": "starting 2 ranks"} and said[-1]["doing"].startswith("all_reduce of bfloat16[32, ")


def test_a_rank_that_exchanges_wrongly_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(faulty_exchanges.__file__).parent))
    asked = {"model": str(folder), "device": SIMULATED, **SIZES}
    journal = Journal(tmp_path / "journal", {})
    found = run_stage(Stage("ranks", "faulty_exchanges:stage", asked), journal, 300)
    journal.close(finished=True)
    ulp, hang, die = (re.sub(r"\d+", "N", outcome.reason) for outcome in found)
    assert [outcome.status for outcome in found] == [WRONG, FAILED, FAILED]
    assert ulp == "all_reduce of floatN[N, N]: rank N has other bits than rank N"
    assert "rank N (pid N) took too long in all_reduce of floatN[N, N]" in hang
    assert "rank N (pid N) died with signal N in all_reduce of floatN[N, N]" in die
    assert found[1].found["doing"].startswith("all_reduce of float32[1, "), "what was under way is kept"


def test_ranks_serve_and_end_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_file, "_DECODED", 8)
    made = items(folder)
    assert list(made) == [*KINDS, "operators one by one", BROKEN], "without what runs graphs"
    engine, started = ranks_file._engine, list[LLM]()
    with ExitStack() as stack:

        @contextmanager
        def once(*given: Any) -> Iterator[LLM]:
            """The same engine for both items, which takes long to start."""
            if not started:
                started.append(stack.enter_context(engine(*given)))
            yield started[0]

        monkeypatch.setattr(ranks_file, "_engine", once)
        found = made["operators one by one"](silent)
        assert found["wrong"] == "" and found["same_tokens"] == found["sequences"] == 3
        monkeypatch.setattr(ranks_file, "_STEPS", started[0].stats()["steps"] + ranks_file._STEPS)
        broken = made[BROKEN](silent)
    assert broken["wrong"] == "" and broken["error"].startswith("rank 1 (pid …) died with signal 9 in step ")
    stages = {"ranks": [Outcome("operators one by one", RIGHT, found=found), Outcome(BROKEN, RIGHT, found=broken)]}
    report = make_report({"device": [], **stages}, facts={}, secrets={})
    assert [section.title for section in sections(report.data)][:2] == [
        "Questions for hardware",
        "Served by several ranks",
    ]
    assert "3 of 3 sequences have transformers' tokens" in report.data["answers"][0]["answer"]


@pytest.mark.torchair
@pytest.mark.parametrize("name", [name for name, options in WAYS.items() if options["codegen"] != "none"])
def test_ranks_serve_by_graphs(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_file, "_DECODED", 8)
    with simulated_npus():
        found = items(folder)[name](silent)
    assert found["wrong"] == "" and found["same_tokens"] == found["sequences"] == 3
    assert found["codegen"] == WAYS[name]["codegen"] and found["sizes"] and not found["operator_steps"]


@pytest.mark.torchair
def test_a_capture_that_one_rank_cannot_make_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_file, "_DECODED", 8)
    with simulated_npus("1:3"):
        found = items(folder)["captured graphs"](silent)
    assert found["wrong"] == "decode steps of 3 tokens are left out: it fails: another rank could not capture it"
    assert found["same_tokens"] == 3, "its steps run at another size"


# What is compared


def test_tokens_that_roundings_explain_are_right() -> None:
    logits = torch.zeros(3, 8)
    logits[:, 0], logits[:, 1], logits[:, 2] = 2.0, 1.999, 1.0
    expected = _Expected([[5], [6]], [[0, 0, 0], [0, 0, 0]], [logits, logits], 0.01, 1.0)
    assert _compared([[0, 0, 0], [0, 0, 0]], expected) == ("", 2)
    assert _compared([[0, 0, 0], [0, 1, 7]], expected) == ("", 1), "what follows another token is another text"
    wrong, same = _compared([[0, 0, 2], [0, 0, 0]], expected)
    assert wrong.startswith("token 2 of a sequence is another than transformers', 1.") and same == 1
    expected.share = 0.5
    assert _compared([[0, 0, 2], [0, 0, 0]], expected) == ("", 1), "routers choose other experts on ties"


@pytest.mark.parametrize(
    ("names", "ranks", "simulated", "wanted"),
    [
        ((), 1, False, ("device", "operators", "passes", "graphs")),
        ((), 2, False, ("device", "operators", "passes", "graphs", "ranks")),
        ((), 2, True, ("ranks",)),
        (("graphs",), 2, False, ("graphs",)),
    ],
)
def test_stages(names: tuple[str, ...], ranks: int, simulated: bool, wanted: tuple[str, ...]) -> None:
    assert stages_of(names, ranks, simulated=simulated) == wanted


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(torch_device=SimpleNamespace(type="npu"))
    monkeypatch.setattr(ranks_file, "open_device", lambda asked: device)
    monkeypatch.setattr(torch, "npu", SimpleNamespace(device_count=lambda: 1), raising=False)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 needs as many devices, and this machine has 1"):
        stage(model="nowhere", tensor_parallel_size=2)


def test_the_questions_about_exchanges_are_answered() -> None:
    each = {"wrong": "", "repeats": True, "in_order": False}
    outcome = asdict(Outcome("all_reduce", RIGHT, found={"exchanges": [each, each | {"wrong": "x"}]}))
    (answer,) = answers({"ranks": [outcome]})
    assert answer["answer"] == (
        "1 of 2 are right; 2 of 2 sums have the same bits a second time; 0 of 2 sums have the bits of a sum in the "
        "order of the ranks"
    )
