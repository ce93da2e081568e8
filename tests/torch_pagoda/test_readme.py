"""What README promises of itself, and the tables of docs/ that repeat what the code says."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields

from page_text import PAGES, ROOT, code_blocks, section

from torch_pagoda import LLM, SamplingParams
from torch_pagoda.cli.engine_options import LLM_OPTIONS
from torch_pagoda.runtime.batching.policies import POLICIES


def test_the_two_commands_come_first() -> None:
    blocks = code_blocks(PAGES["README.md"], "bash")
    constraints = " -c constraints.txt" if (ROOT / "constraints.txt").is_file() else ""
    assert blocks[0].strip() == f'pip install -e ".[test]"{constraints} && python examples/quickstart.py'
    assert blocks[1].strip() == f'pip install -e ".[test]"{constraints} && pytest'
    assert (ROOT / "examples" / "quickstart.py").is_file()


def test_readme_is_short_enough_to_be_read() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 150


def test_options_table_is_the_signature() -> None:
    page = PAGES["docs/options.md"]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", page.split("\n## ")[0], re.MULTILINE)
    documented = [name for names, _ in rows for name in re.findall(r"\w+", names)]
    parameters = inspect.signature(LLM).parameters
    assert set(documented) == set(parameters) - {"model"}
    for names, default in rows:
        literal = re.fullmatch(r"`(.*)`", default)
        if literal and literal[1] != "None":
            name = names.strip("`")
            assert ast.literal_eval(literal[1]) == parameters[name].default, name
    sampling = section(page, "SamplingParams").split("`SamplingParams` takes")[1].split("`")[1]
    assert set(sampling.split(", ")) <= set(inspect.signature(SamplingParams).parameters)


def unnamed_values(page: str) -> list[str]:
    """Values that ``--help`` lists for an option ("a, b or c."), and the row of the option does not."""
    rows = dict(re.findall(r"^\| `(\w+)` (.*)$", page, re.MULTILINE))
    listed = {
        field.name: re.findall(r"[\w-]+", field.metadata["help"].replace(" or ", ", "))
        for part in LLM_OPTIONS
        for field in fields(part)
        if re.fullmatch(r"[\w-]+(, [\w-]+)* or [\w-]+\.", field.metadata.get("help", ""))
    }
    assert set(listed) >= {"dtype", "device", "policy", "preemption", "verify", "codegen"}
    return [
        f"{name}={value}" for name, values in listed.items() for value in values if f'"{value}"' not in rows[name]
    ]


def test_options_table_names_the_values_of_help() -> None:
    page = PAGES["docs/options.md"]
    assert unnamed_values(page) == []
    assert unnamed_values(page.replace('"sjf"', '"sfj"')) == ["policy=sjf"]


def test_policies_table_is_the_list() -> None:
    table = section(PAGES["docs/serving.md"], "Policies")
    assert re.findall(r'^\| `"(\w+)"` \|', table, re.MULTILINE) == list(POLICIES)
