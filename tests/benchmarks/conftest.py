"""Makes the modules of benchmarks/ importable by their own names, as they import one another."""

from __future__ import annotations

import sys
from pathlib import Path

# Last: benchmarks/coverage.py must not hide the package of that name.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
