"""The passes stage: compares transformers' logits on the device, and those of the graph after each pass, with the
CPU's."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from ...compiler import UnsupportedModel
from ...compiler.build import build_unpacked
from ...compiler.capture.trace import capture
from ...compiler.options import CompileOptions
from ...compiler.report import CompileReport, PassCheck, first_line
from ...compiler.tolerance import Tolerance
from ...compiler.verify.graph_check import measure_rounding
from ...compiler.verify.self_check import Reference, reference_of_model
from .device import Device
from .model import Asked, load, open_device
from .numbers import plain
from .worker import Items, Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["pass_items", "reference_of", "stage", "with_rounding"]


def stage(**asked: Any) -> Items:
    """The items of the stage; see ``Asked``."""
    given = Asked(**asked)
    device = open_device(given)
    reference = reference_of(given)
    return pass_items(load(given, device.torch_device), reference, device, given)


def reference_of(asked: Asked) -> Reference:
    """The model's logits on the CPU, with the tolerance derived from its own rounding."""
    return with_rounding(load(asked, torch.device("cpu")))


def with_rounding(model: PreTrainedModel) -> Reference:
    """The same of a model that is loaded."""
    reference = reference_of_model(model)
    with suppress(UnsupportedModel):  # every stage that captures the model says why
        measure_rounding(capture(model), reference)
    return reference


def pass_items(model: PreTrainedModel, reference: Reference, device: Device, asked: Asked) -> Items:
    """The items for a model on the device."""
    return {
        "the model as transformers runs it": lambda progress: _original(model, reference, device),
        "pass by pass": lambda progress: _every_pass(model, reference, device, asked, progress),
    }


def _original(model: PreTrainedModel, reference: Reference, device: Device) -> dict[str, Any]:
    found = device.run(lambda: reference_of_model(model, reference.schedule))
    limit = Tolerance(reference.tolerance, reference.share)
    errors = [limit.error(a, b) for a, b in zip(found.logits, reference.logits, strict=True)]
    wrong = f"logits differ from the CPU's by {max(errors):.3g} standard deviations (limit {limit.limit:.3g})"
    return {"wrong": "" if max(errors) <= limit.limit else wrong, "error": plain(max(errors)), "limit": limit.limit}


def _every_pass(
    model: PreTrainedModel, reference: Reference, device: Device, asked: Asked, progress: Progress
) -> dict[str, Any]:
    options = CompileOptions(
        target="npu",
        codegen="none",
        verify="every-pass",
        soc=device.soc,
        block_size=asked.block_size,
        **asked.options,
    )
    report = CompileReport(type(model).__name__)
    report.checks = _ReportedChecks(progress)
    refused = ""
    try:
        device.run(lambda: build_unpacked(model, options, report=report, reference=reference))
    except UnsupportedModel as error:
        refused = first_line(error)
    wrong = [(check.name, check.reason) for check in report.checks if check.reason] + report.dropped_passes
    said = f"{wrong[0][0]} is the first pass that breaks the model: {wrong[0][1]}" if wrong else refused
    return {"wrong": said, "checks": _as_data(report.checks), "limit": plain(reference.tolerance)}


class _ReportedChecks(list[PassCheck]):
    """A list that reports its checks after each append."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def append(self, check: PassCheck) -> None:
        super().append(check)
        self._progress({"checks": _as_data(self)})


def _as_data(checks: list[PassCheck]) -> list[dict[str, Any]]:
    return [{**asdict(check), "error": plain(check.error)} for check in checks]
