"""JSON-Schema-Test-Suite, from jsonschema's source distribution: nothing is accepted that breaks its schema."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from torch_pagoda.runtime.structured.asked import read_structured_outputs
from torch_pagoda.runtime.structured.grammar import compile_grammar
from torch_pagoda.runtime.structured.vocabulary import vocabulary_of

from toy_program import character_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The schemas of draft 2020-12, each with its instances."""
    folder = tmp_path_factory.mktemp("suite")
    command = [*(sys.executable, "-m", "pip", "download", "--no-binary", ":all:", "--no-deps")]
    done = subprocess.run([*command, "jsonschema", "-d", str(folder)], capture_output=True, text=True, check=False)
    archives = list(Path(folder).glob("*.tar.gz"))
    if not archives:
        pytest.skip(f"jsonschema's source cannot be had: {done.stderr.strip()[-200:]}")
    cases: list[dict[str, Any]] = []
    with tarfile.open(archives[0]) as archive:
        for member in archive.getmembers():
            path = Path(member.name)
            if path.suffix == ".json" and path.parts[-3:-1] == ("tests", "draft2020-12"):
                file = archive.extractfile(member)
                assert file is not None
                cases += json.load(file)
    assert len(cases) > 300
    return cases


@pytest.mark.parametrize("whitespace", ["compact", "any"])
def test_nothing_invalid_is_accepted(suite: list[dict[str, Any]], whitespace: str) -> None:
    tokenizer: Any = character_tokenizer()
    vocabulary = vocabulary_of(tokenizer)
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    broken: list[tuple[str, str]] = []
    for case in suite:
        try:
            asked = read_structured_outputs({"json": case["schema"], "whitespace": whitespace})
            grammar = compile_grammar(asked, vocabulary)
        except ValueError as error:
            assert str(error).startswith("structured_outputs.json")
            refusals[str(error)[:100]] += 1
            continue
        counts["schemas"] += 1
        for test in case["tests"]:
            matcher = grammar.matcher()
            ids = tokenizer(json.dumps(test["data"], ensure_ascii=False), add_special_tokens=False).input_ids
            accepted = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            counts["accepted" if accepted else "not accepted", "valid" if test["valid"] else "invalid"] += 1  # type: ignore[index]
            if accepted and not test["valid"]:
                broken.append((case["description"], test["description"]))
    print(dict(counts), f"{sum(refusals.values())} schemas refused", *refusals.most_common(), sep="\n")
    assert broken == []
    # It is of use: most of what is taken is enforced as the suite means it, and not by accepting nothing.
    assert counts["schemas"] > 150 and counts["accepted", "valid"] > 300  # type: ignore[index]
