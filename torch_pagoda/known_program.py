"""A checkpoint's program from an earlier start, without the model's class."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

from .compiler import CheckpointFiles, CompileOptions, program_of_checkpoint
from .compiler.calibrate.recorded_grid import on_recorded_grid
from .model_facts import model_of
from .runtime.autocast import without_autocast

logger = logging.getLogger(__name__)


def known_program(files: CheckpointFiles, options: CompileOptions) -> tuple[Any, Any] | None:
    """The program of a checkpoint that was compiled before, and its configs (see ``model_facts.model_of``).

    Args:
        files: the checkpoint's.
        options: as given to ``LLM``, for a CPU.

    Raises:
        ValueError: the options contradict the grid that the checkpoint's weights lie on.
    """
    options = on_recorded_grid(options, SimpleNamespace(**json.loads(files.texts["config.json"])))
    with without_autocast("cpu"):
        found = program_of_checkpoint(files, options)
    if found is None:
        return None
    program, facts = found
    try:
        return program, model_of(facts)
    except ValueError as error:
        logger.info("the model is loaded: %s", error)
        return None
