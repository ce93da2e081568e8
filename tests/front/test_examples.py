"""The example scripts as a newcomer runs them; CI runs quickstart.py by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(script: str) -> str:
    finished = subprocess.run([sys.executable, EXAMPLES / script], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_drop_in() -> None:
    lines = run("drop_in.py").splitlines()
    assert float(lines[0].removeprefix("forward: largest difference to eager ")) < 1e-3
    assert lines[-1] == "generate: same tokens as eager: True"


def test_generate_batch() -> None:
    texts = run("generate_batch.py").split("\n\n")
    for prompt in ("Return the", "Raise a ValueError if the given", "A context manager that"):
        assert any(text.startswith(prompt) and len(text) > len(prompt) for text in texts)
