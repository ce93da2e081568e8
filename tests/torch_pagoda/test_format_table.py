"""The tables of formats in the pages: every row has checkpoints, written by the tests, that are served as it says."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

from gguf_files import KINDS
from page_text import PAGES, section
from quantized_checkpoints import FORMATS, LARGE

from torch_pagoda.checkpoint.gguf.block_types import BLOCK_TYPES
from torch_pagoda.runtime.ops.linear.quantized_weight import packed_bytes, scheme_of

ROWS = {
    "compressed-tensors `pack-quantized`": (
        *("ct-w4a16", "ct-w4a16-row", "ct-w4a16-order", "ct-w4a16-asym", "ct-w8a16-asym"),
    ),
    "compressed-tensors `int-quantized`, `naive-quantized`": (
        *("ct-w8a8", "ct-w8a8-naive", "ct-w8a8-tensor", "ct-w8a8-g32", "ct-w8a8-groups", "ct-w8a8-dynamic"),
        *("ct-w8a8-dynamic-asym", "ct-w8a8-static", "ct-w8a8-static-asym"),
    ),
    "compressed-tensors `mxfp4-pack-quantized`": ("ct-mxfp4",),
    "compressed-tensors `float-quantized` (FP8)": ("ct-fp8", "ct-fp8-tensor", "ct-fp8-blocks", "ct-mxfp8"),
    "compressed-tensors `nvfp4-pack-quantized`": ("ct-nvfp4",),
    "GPTQ": ("gptq-4-g32", "gptq-4-row-sym", "gptq-4-order", "gptq-v2-8", "gptq-3", "gptq-2"),
    "AWQ `gemm`": ("awq",),
    "AutoRound `auto_gptq`, `auto_awq`": ("autoround-gptq", "autoround-awq"),
    "FP8 in blocks": ("fp8-blocks", "fp8-uneven"),
    "MXFP4 experts": ("mxfp4-experts",),
    "msModelSlim `W8A8_DYNAMIC`, `W8A16`": ("slim-w8a8-dynamic", "slim-w8a16"),
    "msModelSlim static `W8A8`": ("slim-w8a8-static", "slim-w8a8-static-bits"),
    "msModelSlim `W4A8_DYNAMIC`": (
        *("slim-w4a8", "slim-w4a8-experts", "slim-w4a8-g32", "slim-w4a8-g32-plain", "slim-w4a8-g128"),
        "slim-w4a8-g256",
    ),
}
"""Beginning of a row of docs/quantization.md → formats that prove it: ``test_read_quantized`` reads each of
``FORMATS`` and asks that it is served as stored, or unpacked where its groups are of another size."""
OTHERS = {"bitsandbytes `nf4`, `fp4`": "test_bitsandbytes.py", "GGUF": "test_gguf_models.py"}
"""Beginning of other rows → the tests that prove them, beside this file."""
BITS = re.compile(r"(\d+) bits a weight")


def rows() -> list[list[str]]:
    """The cells of the table's rows."""
    text = section(PAGES["docs/quantization.md"], "Quantized checkpoints")
    lines = text.split("| format | read | served |\n")[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_row_has_formats_and_every_format_a_row() -> None:
    for name, _, served in rows():
        (known,) = (start for start in chain(ROWS, OTHERS) if name.startswith(start))
        assert known in OTHERS or served.startswith("as stored"), name
    assert len([name for name, *_ in rows() if not name.startswith("GGUF")]) == len(ROWS) + 1
    assert sorted(chain(*ROWS.values())) == sorted(FORMATS | LARGE)
    assert all(Path(__file__).with_name(name).is_file() for name in OTHERS.values())


def test_readme_counts_the_formats() -> None:
    (count,) = re.findall(r"(\d+) formats that the tests write", PAGES["README.md"])
    assert int(count) == len(FORMATS)


def test_types_of_gguf_are_held_in_the_bits_that_the_page_says() -> None:
    kinds = {kind.name: kind for kind in BLOCK_TYPES.values()}
    said: dict[str, str] = {}
    for name, _, served in rows():
        if name.startswith("GGUF"):
            said |= dict.fromkeys(re.findall(r"`(\w+)`", name), served)
    floats = {name for name, served in said.items() if served == "floats of the model's dtype"}
    assert said.keys() - floats == set(KINDS) and floats == {"F32", "F16", "BF16"}
    for name in KINDS:
        kind, stated = kinds[name], BITS.search(said[name])
        assert kind.form is not None and said[name].startswith(("as stored", "codes as stored")) == kind.keeps_bits
        bits = packed_bytes(64, 256, scheme_of(kind.form)) * 8 / (64 * 256)
        assert (said[name] == "as stored") if stated is None else int(stated[1]) == bits, name
