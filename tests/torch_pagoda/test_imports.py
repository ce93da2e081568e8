"""What a start that finds its program does not import."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import torch_pagoda.llm
import torch_pagoda.compiled_model
print(*(name for name in ("sympy", "torch._dynamo", "transformers.modeling_utils") if name in sys.modules))
"""


def test_a_start_imports_no_tracer_and_no_models() -> None:
    """They take as long as the rest of a second start."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
