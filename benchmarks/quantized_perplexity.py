"""What rounded weights cost in perplexity: the shipped model as it is, calibrated by `pagoda quantize`, and in the
formats of quantized checkpoints.

    python benchmarks/quantized_perplexity.py [--dtype bfloat16] [--formats all] [--tokens 65536] [--group-size 64]

The text is that of examples/pydoc_text.py: documents that the model was not trained on, and two samples of those that
it was trained on: modules, and the language reference. Calibration reads the other modules that it was trained on,
none of the measured documents. With ``--formats`` the model is also written in formats of quantized checkpoints,
rounded to nearest, and served as they are stored: inputs of 8 bits where a format has them, those with scales of
their own calibrated on 16 windows of the other modules.

Ratios to the perplexity of the float model in the same dtype. Of a format also the ratio to that of transformers over
the weights that it means, with inputs of 8 bits where it has them, and in bfloat16 what that dtype does to both.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.cli import main as pagoda
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.options import QUANTIZATIONS

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "examples")]
from pydoc_text import gather_documents  # noqa: E402
from quantized_checkpoints import FORMATS, quantize_folder, write_means  # noqa: E402

from perplexity import loss_of_transformers, loss_per_token  # noqa: E402

MODEL = ROOT / "examples" / "tiny-pydoc"
WINDOW = 256
PER_STEP = 16  # windows that are computed together
MEASURED = 48  # windows of each text
CALIBRATED_ON = 16  # windows, of formats with scales of inputs
DISTINCT = (
    *("ct-w4a16-row", "ct-w4a16", "awq", "ct-nvfp4", "ct-mxfp4", "ct-w8a8", "ct-w8a8-dynamic", "ct-w8a8-static"),
    *("ct-w8a8-static-asym", "ct-fp8", "fp8-blocks", "slim-w8a8-static", "slim-w4a8", "slim-w4a8-g32"),
)
"""Formats of which no two store the same numbers and round their inputs alike."""


def texts() -> tuple[dict[str, torch.Tensor], list[str]]:
    """The windows ``[N, WINDOW]`` that are measured, and the documents that are left to calibrate on."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    measured: dict[str, list[int]] = {"held out": [], "trained on, modules": [], "trained on, reference": []}
    others = []
    for document in gather_documents():
        is_topic = document.name.startswith("topic ")
        name = "held out" if document.held_out else f"trained on, {'reference' if is_topic else 'modules'}"
        if len(measured[name]) < MEASURED * WINDOW:
            measured[name] += tokenizer(document.text, verbose=False)["input_ids"]
        elif name == "trained on, modules":
            others.append(document.text)
    return {n: torch.tensor(ids[: MEASURED * WINDOW]).view(-1, WINDOW) for n, ids in measured.items()}, others


def losses(folder: Path, dtype: str, measured: dict[str, torch.Tensor], **options: object) -> dict[str, float]:
    """Of each text, in nats per token."""
    model = load_model(str(folder), dtype, False, torch.device("cpu"))
    given = CompileOptions.from_dict({"verify": "off", "codegen": "none", **options})
    program = build_program(model, given)
    return {
        name: sum(loss_per_token(program, part) * len(part) for part in windows.split(PER_STEP)) / len(windows)
        for name, windows in measured.items()
    }


def in_format(
    name: str, folder: Path, dtype: str, measured: dict[str, torch.Tensor], seen: torch.Tensor
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The losses of the model in a format, and by dtype those of transformers over what its weights mean.

    Args:
        name: of the format.
        folder: for checkpoints; there is none yet.
        dtype: that the model is served in.
        measured: windows by text.
        seen: windows that scales of inputs are calibrated on.
    """
    stored, means = folder / "stored", folder / "means"
    for copy in (stored, means):
        shutil.copytree(MODEL, copy)
    write_means(means, quantize_folder(stored, name, seen))
    model = load_model(str(stored), dtype, False, torch.device("cpu"))
    theirs = {
        kind: {
            n: loss_of_transformers(means, getattr(torch, kind), windows, model) for n, windows in measured.items()
        }
        for kind in dict.fromkeys((dtype, "float32"))
    }
    return losses(stored, dtype, measured), theirs


def print_ratios(label: str, found: dict[str, float], beside: dict[str, float], digits: int = 4) -> None:
    ratios = " ".join(f"{math.expm1(found[name] - beside[name]):22.{digits}%}" for name in found)
    print(f"{label:>30} {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="to calibrate on")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--formats",
        nargs="*",
        choices=("all", *FORMATS),
        default=(),
        metavar="FORMAT",
        help=f"of quantized checkpoints, too; all: {', '.join(DISTINCT)}",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measured, others = texts()
    right = losses(MODEL, options.dtype, measured)
    print(f"{'tiny-pydoc':>30} " + " ".join(f"{name:>22}" for name in measured))
    first = " ".join(f"{math.exp(right[name]):22.4f}" for name in measured)
    print(f"{'perplexity, ' + options.dtype:>30} {first}", flush=True)

    def report(label: str, folder: Path, **given: object) -> None:
        print_ratios(label, losses(folder, options.dtype, measured, **given), right, 2)

    with tempfile.TemporaryDirectory() as scratch:
        text, calibrated = Path(scratch, "text"), Path(scratch, "calibrated")
        text.write_text("\n\n".join(others), encoding="utf-8")
        sizes = ["--group-size", str(options.group_size), "--tokens", str(options.tokens), "--window", str(WINDOW)]
        try:
            pagoda(["quantize", str(MODEL), str(calibrated), "--text", str(text), *sizes])
        except SystemExit as ended:
            if ended.code:
                raise
        for quantization in QUANTIZATIONS:
            how = {"quantization": quantization, "group_size": options.group_size}
            report(f"to nearest, {quantization}", MODEL, **how)
            if quantization.startswith("int4"):
                report(f"calibrated, {quantization}", calibrated, **how)
        ids = AutoTokenizer.from_pretrained(MODEL)("\n\n".join(others), verbose=False)["input_ids"]
        seen = torch.tensor(ids[: CALIBRATED_ON * WINDOW]).view(-1, WINDOW)
        wanted = (name for given in options.formats for name in (DISTINCT if given == "all" else (given,)))
        for name in dict.fromkeys(wanted):
            found, theirs = in_format(name, Path(scratch, name), options.dtype, measured, seen)
            print_ratios(name, found, right, 2)
            print_ratios("beside transformers", found, theirs[options.dtype])
            if options.dtype != "float32":
                print_ratios("beside it in float32", found, theirs["float32"])
                print_ratios("transformers beside that", theirs[options.dtype], theirs["float32"])


if __name__ == "__main__":
    main()
