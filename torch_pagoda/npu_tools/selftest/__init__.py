"""Tests an Ascend device with a model: each operator, each pass, each way to run the graph, with timings.

The main process imports torch only for the page and tables, after all stages. Each stage runs in a process of its
own, which may die or hang; a journal keeps its earlier results.
"""

from .report import Report
from .selftest import run_selftest

__all__ = ["Report", "run_selftest"]
