"""What rounded weights cost in perplexity: the shipped model as it is, and calibrated by `pagoda quantize`.

    python benchmarks/quantized_perplexity.py [--tokens 65536] [--group-size 64] [--threads 2]

The text is that of examples/pydoc_text.py: documents that the model was not trained on, and two samples of those that
it was trained on: modules, and the language reference. Calibration reads the other modules that it was trained on,
none of the measured documents. Ratios to the perplexity of the float model, in float32.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_pagoda.cli import main as pagoda
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.options import QUANTIZATIONS

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "examples")]
from pydoc_text import gather_documents  # noqa: E402

from perplexity import loss_per_token  # noqa: E402

MODEL = ROOT / "examples" / "tiny-pydoc"
WINDOW = 256
PER_STEP = 16  # windows that are computed together
MEASURED = 48  # windows of each text


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


def losses(folder: Path, measured: dict[str, torch.Tensor], **options: object) -> dict[str, float]:
    """Of each text, in nats per token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = CompileOptions.from_dict({"verify": "off", "codegen": "none", **options})
    program = build_program(model, given)
    return {
        name: sum(loss_per_token(program, part) * len(part) for part in windows.split(PER_STEP)) / len(windows)
        for name, windows in measured.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="to calibrate on")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measured, others = texts()
    right = losses(MODEL, measured)
    print(f"{'tiny-pydoc':>30} " + " ".join(f"{name:>22}" for name in measured))
    print(f"{'perplexity, float32':>30} " + " ".join(f"{math.exp(right[name]):22.4f}" for name in measured))

    def report(label: str, folder: Path, quantization: str, group_size: int) -> None:
        found = losses(folder, measured, quantization=quantization, group_size=group_size)
        ratios = " ".join(f"{math.expm1(found[name] - right[name]):22.2%}" for name in measured)
        print(f"{label + ', ' + quantization:>30} {ratios}", flush=True)

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
            report("to nearest", MODEL, quantization, options.group_size)
            if quantization.startswith("int4"):
                report("calibrated", calibrated, quantization, options.group_size)


if __name__ == "__main__":
    main()
