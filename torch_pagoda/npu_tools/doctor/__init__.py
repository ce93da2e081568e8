"""Checks of an Ascend installation: problems and remedies. Nothing here imports torch.

An installed torch_npu without CANN breaks ``import torch``, which is one of the problems to find.
"""

from .checkup import CHECKS, examine
from .finding import OK, PROBLEM, UNKNOWN, Finding
from .system import System

__all__ = ["CHECKS", "OK", "PROBLEM", "UNKNOWN", "Finding", "System", "examine"]
