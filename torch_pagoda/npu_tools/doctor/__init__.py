"""Checks of an Ascend installation: what is wrong with it and what to do. Nothing here imports torch.

An installed torch_npu without CANN breaks ``import torch``, and that is one of the things to be found.
"""

from .checkup import CHECKS, examine
from .finding import OK, PROBLEM, UNKNOWN, Finding
from .system import System

__all__ = ["CHECKS", "OK", "PROBLEM", "UNKNOWN", "Finding", "System", "examine"]
