"""``pagoda inspect`` and ``pagoda bisect``: what the compiler does to a model, and which pass breaks it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..compiler.choices import Choices
from ..load_options import LoadOptions
from ..runtime.option import option
from .engine_options import PassOptions
from .errors import one_line_errors
from .format_table import format_table
from .phases import show_phases
from .with_options import Model, with_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..checkpoint.format_bytes import FormatBytes
    from ..compiler.costs.skeleton import Skeleton
    from ..compiler.report import CompileReport
    from ..reports.draft_needs import DraftNeeds

CULPRIT_FOUND = 1

_COMPILING = "dtype skip_pass only_pass trust_remote_code verbose debug"


@dataclass(frozen=True)
class InspectOptions(PassOptions):
    """Options of ``pagoda inspect``, in addition to the compiler's."""

    context: int = option(1024, "Tokens of the sequence whose decode step is estimated, for an NPU.")
    torchair: bool = option(
        True,
        "Let the real torchair convert the graph for an NPU, where it is set up.",
        flags=("--torchair/--no-torchair",),
    )
    schedule: bool = option(
        False, "Show what a decode step could run on a second stream of an NPU, fetch early and launch as one."
    )
    html: Path | None = option(None, "Write a page with drawings there.", metavar="FILE")
    json_file: Path | None = option(
        None, "Write everything as JSON there; '-': stdout.", flags=("--json",), metavar="FILE"
    )
    layer: int | None = option(None, "Decoder layer to draw in the page.")
    speculative_config: Mapping[str, Any] | None = option(
        None, 'Show a draft model or a head, e.g. {"method": "mtp"}.', metavar="JSON"
    )


_INSPECT_PANELS = (
    ("", f"target soc cann context torchair schedule html json_file layer verify opt_level {_COMPILING}"),
    (
        "Engine",
        "quantization kv_cache_dtype tensor_parallel_size pipeline_parallel_size expert_parallel_size "
        "enable_expert_parallel speculative_config",
    ),
)


@with_options(InspectOptions, _INSPECT_PANELS, (LoadOptions,), (Choices,))
def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="Checkpoint folder, hub id, or a folder with a config.json alone: then a few layers of each kind "
            "are built without weights, and nothing is compared.",
            metavar="MODEL",
        ),
    ],
    own: InspectOptions,
    load: dict[str, Any],
    choices: dict[str, Any],
) -> None:
    """Show what each pass did to a model, what it left alone and why, and every decoder layer before and after.

    With --target npu also: the routes that lowering took and why not better ones, the kernels that torchair's graph
    launches (after: pagoda npu setup), and the least time that a step can take. No NPU is needed. With -tp: what each
    of several ranks holds, what they exchange in a step, and what stays whole on all of them. With -pp: the layers
    and bytes of each stage.

    Nothing is generated. Exit status: 0, also for a model that cannot be served (the report says why), 2 for a
    mistake in the arguments.
    """
    _log(own.verbose)
    with one_line_errors(own.debug):
        from ..reports import explain

        with show_phases(model):
            module, weights = _load_or_build(model, load, choices["target"])
            formats = _formats(weights, choices["target"])
            drafts = _drafts(own.speculative_config, model, load, choices)
            explanation = explain(
                module,
                **choices,
                passes=own.passes,
                context=own.context,
                torchair=own.torchair,
                schedule=own.schedule,
            )
        if own.html is not None:
            explanation.to_html(own.html, own.layer)
        said = explanation.to_dict()
        if formats:
            said["formats"] = [asdict(one) for one in formats]
        if drafts is not None:
            said["drafts"] = drafts.to_dict()
        text = json.dumps(said, indent=1, allow_nan=False)
        if own.json_file is not None and str(own.json_file) != "-":
            own.json_file.write_text(text + "\n", encoding="utf-8")
    if own.json_file is not None and str(own.json_file) == "-":
        print(text)
        return
    Console().print(explanation)
    if formats:
        Console().print(format_table(formats))
    if drafts is not None:
        Console().print(str(drafts), highlight=False)
    for file in (own.html, own.json_file):
        if file is not None:
            typer.echo(f"written: {file}", err=True)


@with_options(PassOptions, (("", f"target codegen opt_level {_COMPILING}"),), (LoadOptions,), (Choices,))
def bisect(model: Model, own: PassOptions, load: dict[str, Any], choices: dict[str, Any]) -> None:
    """Compile a model, compare it with the original after each pass, and name the first pass that breaks it.

    With PAGODA_DUMP=folder in the environment, a script that shows the failure is written there. Exit status: 0 when
    every pass is right, 1 when one is not, 2 for a mistake in the arguments or a model that cannot be served.
    """
    _log(own.verbose)
    with one_line_errors(own.debug):
        from ..compiler import UnsupportedModel
        from ..compiler.build import build_program
        from ..compiler.options import CompileOptions
        from ..compiler.report import CompileReport

        options = CompileOptions.from_dict({**choices, "verify": "every-pass", "passes": own.passes})
        with show_phases(model):
            module = _load(model, load, options.target)
            report = CompileReport(type(module).__name__)
            try:
                build_program(module, options, owns_weights=True, report=report)
            except UnsupportedModel:
                if not _culprit(report):
                    raise
    Console().print(_checks(report))
    name, reason = _culprit(report)
    if name:
        typer.echo(f"{name} is the first that breaks {report.model}: {reason}")
        raise typer.Exit(CULPRIT_FOUND)
    error = (
        "" if report.verdict is None else f" (error {report.verdict.error:.2g}, limit {report.verdict.tolerance:.2g})"
    )
    typer.echo(f"every pass is right, and so is the finished program{error}")


def _log(verbose: bool) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="%(name)s: %(message)s")


def _load_or_build(
    model: str, load: Mapping[str, Any], target: str
) -> tuple[PreTrainedModel | Skeleton, PreTrainedModel | None]:
    """The model, or a few layers of it if the folder has no weights; and what has its quantized weights, None for a
    float checkpoint."""
    from ..checkpoint.source import lacks_weights
    from ..compiler.capture.stored_parameters import has_stored_parameters

    if not lacks_weights(model):
        loaded = _load(model, load, target)
        return loaded, loaded if has_stored_parameters(loaded) else None
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from ..checkpoint.configs import load_config
    from ..checkpoint.loading import resolve_dtype
    from ..checkpoint.quantized import quantization_method
    from ..compiler.costs.skeleton import build_skeleton
    from ..reports.stated_formats import stated_model
    from ..reports.stored_formats import stored_skeleton

    name, config = load_config(model, trust_remote_code=False)
    kind, dtype = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], resolve_dtype(load["dtype"])
    method = quantization_method(config, name)
    if method is None:
        return build_skeleton(kind, config, dtype), None
    whole = stated_model(kind, config, method, name, dtype)
    return stored_skeleton(whole), whole if has_stored_parameters(whole) else None


def _formats(model: PreTrainedModel | None, target: str) -> list[FormatBytes]:
    """The formats of a quantized checkpoint; empty for an unquantized one."""
    from ..checkpoint.format_bytes import formats_of, formats_of_gguf
    from ..checkpoint.gguf.checkpoint import open_gguf
    from ..checkpoint.gguf.container import is_gguf
    from ..compiler.capture.stored_parameters import latent_attention_weights

    if model is None:
        return []
    name = model.name_or_path
    if name and is_gguf(name):
        return formats_of_gguf(open_gguf(name), model.dtype, target=target)
    unpacked = [name for name, _ in latent_attention_weights(model)] if target == "npu" else []
    return formats_of(model.named_parameters(), model.dtype, target=target, unpacked=unpacked)


def _drafts(
    given: Mapping[str, Any] | None, model: str, load: Mapping[str, Any], choices: Mapping[str, Any]
) -> DraftNeeds | None:
    """The draft model or the head; None without one."""
    from ..checkpoint.loading import resolve_dtype
    from ..compiler.options import CompileOptions
    from ..device import resolve_device
    from ..reports.draft_needs import draft_needs

    options = CompileOptions.from_dict(dict(choices)).for_device(resolve_device("auto").type)
    return draft_needs(given, model, resolve_dtype(load["dtype"]), options)


def _load(model: str, load: Mapping[str, Any], target: str) -> PreTrainedModel:
    """The model, after the checks that need no weights.

    Args:
        model: checkpoint folder or hub id.
        load: keyword arguments of ``load_model``.
        target: "auto", "cpu" or "npu".
    """
    import sys

    from transformers.utils import logging as transformers_logging

    from ..checkpoint.loading import load_model
    from ..compiler.options import CompileOptions
    from ..device import resolve_device

    CompileOptions(target=target)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    return load_model(model, **load, device=resolve_device("auto"))


def _culprit(report: CompileReport) -> tuple[str, str]:
    """The first pass, or the code generator, that breaks the model, and the reason; ("", "") if none does."""
    wrong = [(check.name, check.reason) for check in report.checks if check.reason]
    return (wrong + report.dropped_passes)[0] if wrong or report.dropped_passes else ("", "")


def _checks(report: CompileReport) -> Table:
    """One row per pass: its matches and the error after it."""
    from ..rendering.fitted_table import FittedTable

    table = FittedTable(box=None, padding=(0, 2, 0, 0))
    table.add_column("pass")
    for name in ("matches", "error"):
        table.add_column(name, justify="right")
    table.add_column("")
    checks = list(report.checks)
    for record in report.passes:
        while checks and checks[0].reason:
            _add_wrong(table, checks.pop(0).name, report)
        compared = checks and checks[0].name == record.name
        error = f"{checks.pop(0).error:.2g}" if compared else ""
        table.add_row(Text(record.title, style="" if record.matches else "dim"), str(record.matches), error, "")
    for check in checks:
        _add_wrong(table, check.name, report)
    known = {check.name for check in report.checks}
    for name, _ in report.dropped_passes:
        if name not in known:
            _add_wrong(table, name, report)
    return table


def _add_wrong(table: Table, name: str, report: CompileReport) -> None:
    check = next((c for c in report.checks if c.name == name and c.reason), None)
    reason = check.reason if check else dict(report.dropped_passes).get(name, "")
    error = f"{check.error:.2g}" if check else ""
    table.add_row(Text(name, style="red"), "", error, Text(f"wrong: {reason}", style="red"))
