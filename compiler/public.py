"""The compiler's public names: ``compile_program``, its options, report and errors, and the two guards."""

from __future__ import annotations

from ..passes.graph.traced import NotFinite, UnsupportedModel
from .compile import compile_program, program_of_checkpoint
from .live_module.module_guard import ModuleGuard
from .options import CompileOptions
from .report import CompileReport
from .warm_start.checkpoint_files import CheckpointFiles
from .weights.weight_guard import WeightGuard

__all__ = [
    "CheckpointFiles",
    "CompileOptions",
    "CompileReport",
    "ModuleGuard",
    "NotFinite",
    "UnsupportedModel",
    "WeightGuard",
    "compile_program",
    "program_of_checkpoint",
]
