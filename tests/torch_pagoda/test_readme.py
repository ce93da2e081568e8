from __future__ import annotations

import ast
import inspect
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import torch_pagoda as pagoda
from torch_pagoda import LLM, SamplingParams, cli
from torch_pagoda.runtime.batching.policies import POLICIES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_two_commands_come_first() -> None:
    blocks = code_blocks("bash")
    assert blocks[0].strip() == 'pip install -e ".[test]" && python examples/quickstart.py'
    assert blocks[1].strip() == 'pip install -e ".[test]" && pytest'
    assert (ROOT / "examples" / "quickstart.py").is_file()


def test_python_blocks_parse() -> None:
    blocks = code_blocks("python")
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_code_for_many_requests_runs(
    checkpoint: Path, fast: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = README.split("### Serving many requests")[1].split("\n### ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    public = {name: getattr(pagoda, name) for name in pagoda.__all__}
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"pagoda": SimpleNamespace(**public | {"LLM": partial(LLM, **fast)})}
    exec(block.replace("path-or-hub-id", str(checkpoint)).replace("1GiB", "1MiB"), names)
    assert names["outputs"][1].num_cached_tokens > 0 and len(names["outputs"][1].outputs) == 2
    assert names["found"][0].sequences[0].token_ids
    assert (tmp_path / "trace.json").stat().st_size > 0
    policies = re.findall(r'^\| `"(\w+)"` \|', section, re.MULTILINE)
    assert policies == list(POLICIES)


def test_named_files_and_folders_exist() -> None:
    named = set(
        re.findall(r"`((?:examples|benchmarks|torch_pagoda|compiler|passes|runtime|tests|\.ci)/[\w./-]*)`", README)
    )
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_options_table_is_the_signature() -> None:
    table = README.split("## Options")[1].split("## ")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", table, re.MULTILINE)
    documented = [name for names, _ in rows for name in re.findall(r"\w+", names)]
    parameters = inspect.signature(LLM).parameters
    assert set(documented) == set(parameters) - {"model"}
    for names, default in rows:
        literal = re.fullmatch(r"`(.*)`", default)
        if literal and literal[1] != "None":
            name = names.strip("`")
            assert ast.literal_eval(literal[1]) == parameters[name].default, name
    sampling = table.split("`SamplingParams` takes")[1].split("`")[1]
    assert set(sampling.split(", ")) <= set(inspect.signature(SamplingParams).parameters)


@pytest.mark.parametrize("block", [b for b in code_blocks("bash") if "pagoda generate" in b])
def test_commands_use_options_that_exist(block: str) -> None:
    command = typer.main.get_command(cli.app)
    lines = re.findall(r"^pagoda (\w+) (.*)$", block, re.MULTILINE)
    assert lines
    for name, rest in lines:
        known = {option for parameter in command.commands[name].params for option in parameter.opts}  # type: ignore[attr-defined]
        used = set(re.findall(r"(?<!\S)(--[a-z-]+)", rest)) - {"--help"}
        assert used <= known, name
