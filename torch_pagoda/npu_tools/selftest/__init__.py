"""A test of an Ascend device on a model: each operator, each pass, each way to run the graph, and how long they take.

The process that a user starts imports torch only for the page and tables, when all stages have ended. Each stage runs
in a process of its own, which may die or hang; what was found until then is in a journal.
"""

from .report import Report
from .selftest import run_selftest

__all__ = ["Report", "run_selftest"]
