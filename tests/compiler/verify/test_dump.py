"""PAGODA_DUMP: stages as Python that can be imported, and a script that shows a failing self-check by itself."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from torch_pagoda.compiler import CompileOptions, options
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.verify import dump
from torch_pagoda.passes import PASSES, Pass, PassRecord
from torch_pagoda.passes.graph.attention_node import paged_attention_nodes

from toy_lm import VOCAB, ToyLM, sdpa

PLAIN = CompileOptions(codegen="none")


def scale_attention(traced):
    """A rewrite that is wrong: every attention's scale is 5 % off."""
    for node in paged_attention_nodes(traced):
        node.args = (*node.args[:11], node.args[11] * 1.05, *node.args[12:])
    return PassRecord("wrong_scale", matches=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What compiling with a wrong pass dumps."""
    root = tmp_path_factory.mktemp("dump")
    kept = tuple(p for p in PASSES if p.stage == "dynamo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(dump.VARIABLE, str(root))
        patch.setattr(options, "PASSES", (*kept, Pass("wrong_scale", scale_attention, stage="aten", required=False)))
        program = build_program(ToyLM(sdpa), dataclasses.replace(PLAIN, verify="every-pass"))
    assert [name for name, _ in program.report.dropped_passes] == ["wrong_scale"]
    return root / "ToyLM"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_stage_that_changed_something_has_a_numbered_file(folder):
    stages = sorted(path.name for path in folder.glob("*.py"))
    assert [name[:2] for name in stages] == [f"{i:02d}" for i in range(len(stages))]
    names = [name[3:-3] for name in stages]
    assert names[:2] == ["captured", "recognize_sdpa"] and names[-2:] == ["aten", "wrong_scale"]
    assert "recognize_eager_attention" not in names, "it matched nothing"


def test_files_say_shapes_and_where_a_line_comes_from(folder):
    text = next(folder.glob("*_captured.py")).read_text()
    assert 'embedding_weight: "f32[61, 32]"' in text
    assert "toy_lm.py:" in text and "# == q (Linear)" in text
    assert "scaled_dot_product_attention(" in text and "modules_q_parameters" not in text
    assert "torch.ops.pagoda.paged_attention" in next(folder.glob("*_insert_paged_cache.py")).read_text()


def test_a_stage_runs_as_it_was_written(folder):
    model = ToyLM(sdpa)
    stage = load(next(folder.glob("*_captured.py")))
    ids = torch.arange(12)[None] % VOCAB
    weights = {n.replace(".", "_"): p for n, p in [*model.named_parameters(), *model.named_buffers()]}
    names = stage.forward.__code__.co_varnames[1 : stage.forward.__code__.co_argcount]
    given = {"L_input_ids_": ids, "L_position_ids_": torch.arange(12)[None], **weights}
    logits = stage.forward(SimpleNamespace(), *[given.get(name, 12) for name in names])[0]
    torch.testing.assert_close(logits, model(ids, torch.arange(12)[None]).logits)


def test_the_reproducer_runs_by_itself_and_shows_the_error(folder, tmp_path):
    script = folder / "failing_wrong_scale" / "run.py"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k != dump.VARIABLE}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr
    last = done.stdout.splitlines()[-1]
    before, after = (float(word) for word in (last.split()[2].strip(","), last.split()[5].strip(",")))
    assert last.startswith("before wrong_scale: ") and before < 2e-3 < after


def test_compilations_do_not_share_folders(tmp_path, monkeypatch):
    monkeypatch.setenv(dump.VARIABLE, str(tmp_path))
    for _ in range(3):
        dump.begin("Model")
    assert {path.name for path in tmp_path.iterdir()} == {"Model", "Model_1", "Model_2"}


def test_nothing_is_written_without_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv(dump.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    build_program(ToyLM(sdpa), dataclasses.replace(PLAIN, verify="off"))
    assert list(tmp_path.iterdir()) == []
