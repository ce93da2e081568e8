"""What rank 0 ships of a program, what every rank makes of it, and the comparison of all ranks with the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...passes import UnsupportedModel
from ...runtime.phases import timed
from ..link.linkage import Linkage
from ..link.linker import LinkedProgram
from ..report import CompileReport
from ..verify.self_check import Reference, check
from ..warm_start.checkpoint_files import CheckpointFiles
from ..warm_start.graph_data import CannotStore
from ..warm_start.record import Sources, sources_in_files, start_tensors
from ..warm_start.restore import StoredProgram, describe, restore, stage_of_rank, tensors_read
from ..warm_start.shipment import AnyProgram, OtherRanks, Shipment
from ..warm_start.stored_sources import Assembled
from ..weights.tensor_contents import module_tensors

if TYPE_CHECKING:
    from ..build import Built

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")


def led(
    own: LinkedProgram, model: nn.Module, reference: Reference | None, owns_weights: bool, others: OtherRanks
) -> AnyProgram:
    """The program of all ranks, compared with the model.

    Raises:
        UnsupportedModel: the ranks together do not compute what the model does.
    """
    if owns_weights:
        own.release_all_but_own(module_tensors(model).values())
    program = others.lead(own)
    if reference is not None:
        with timed(own.report.seconds):
            verdict = check(program, reference, weight_bits=own.weight_bits)
        if not verdict.ok:
            raise UnsupportedModel(f"the ranks together do not compute what the model does: {verdict.reason}")
        own.report.verdict = verdict
    return program


def shipped(built: Built, model: nn.Module) -> StoredProgram:
    """What other ranks need of a program whose weights are not packed yet.

    Raises:
        UnsupportedModel: a part of it has no plain form.
    """
    try:
        data = describe(built.traced, Linkage.of(built.traced, built.program.restart_length), model)
    except CannotStore as error:
        raise UnsupportedModel(
            f"its program cannot be sent to {built.options.world_size - 1} other ranks ({error}); use one process"
        ) from error
    return replace(data, report=CompileReport(built.program.report.model))


def sources_for_ranks(model: nn.Module, files: CheckpointFiles | None) -> Sources | None:
    """Where other ranks find the module's tensors; None where they have to load the module."""
    if files is None:
        return None
    try:
        return sources_in_files(model, files)
    except (CannotStore, OSError, ValueError) as error:
        log.info("every rank loads the whole model: %s", error)
        return None


def program_of_rank(
    shipment: Shipment,
    rank: int,
    files: CheckpointFiles | None,
    module: nn.Module | None,
    device: torch.device = _CPU,
) -> LinkedProgram:
    """The part of a shipped program that one rank runs, its weights packed.

    Args:
        shipment: from rank 0.
        rank: of this process.
        files: the checkpoint's, if ``shipment.sources`` says what is in them.
        module: else the model, which the program takes the weights of.
        device: that this rank computes on.

    Raises:
        Outdated: the checkpoint or the module is not the one that was compiled.
    """
    own = stage_of_rank(shipment.program, rank)
    if shipment.sources is not None and files is not None:
        named: Mapping[str, torch.Tensor | Assembled] = start_tensors(
            shipment.sources, files, tensors_read(own), in_parts=shipment.lowering is None
        )
    else:
        assert module is not None
        named = module_tensors(module)
    if shipment.lowering is not None:
        from .on_npus import lowered_program

        return lowered_program(shipment, rank, named, device)
    program = restore(own, named, merge=not shipment.packs, rank=rank)
    if shipment.packs or program.has_stored_weights:
        program.pack_weights(release=True)
    if module is not None:
        program.release_all_but_own(module_tensors(module).values())
    return program
