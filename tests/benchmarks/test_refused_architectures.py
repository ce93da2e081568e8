"""The table of refused architectures in docs/models.md: all of them, each with the reason that it is refused with."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from exact_coverage import EXPECTED_EXACT
from page_text import PAGES, ROOT

from tiny_models import causal_lm_types

SAMPLE = ("blt", "openai-gpt", "recurrent_gemma", "rwkv")
"""Refused in different steps: masks, recognition, capture, state."""


def documented() -> dict[str, str]:
    """Rows of the table: architecture → line."""
    table = PAGES["docs/models.md"].split("| architecture | reason |\n")[1].split("\n\n")[0]
    return {re.findall("`(.*?)`", line)[0]: line for line in table.splitlines()[1:]}


def test_every_architecture_that_is_not_exact_is_listed() -> None:
    assert set(documented()) == set(causal_lm_types()) - EXPECTED_EXACT
    assert f"| exact | {len(set(causal_lm_types()) & EXPECTED_EXACT)} |" in PAGES["docs/models.md"]


def test_the_reasons_are_the_current_ones(tmp_path: Path) -> None:
    table = tmp_path / "refused.md"
    command = [sys.executable, str(ROOT / "benchmarks" / "coverage.py"), "--only", ",".join(SAMPLE)]
    subprocess.run([*command, "--refused", str(table)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    rows = documented()
    assert table.read_text().splitlines()[2:] == [rows[name] for name in SAMPLE]
