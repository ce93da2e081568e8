"""Quantized weights of which a rank reads its part: the numbers of the whole, in the memory of the part."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_checkpoints import FORMATS, quantize_folder
from safetensors.torch import save_file
from stored_modules import MODULE

from torch_pagoda.checkpoint import quantized_tensors
from torch_pagoda.checkpoint.loading import checkpoint_files, load_model
from torch_pagoda.checkpoint.quantized import quantization_method
from torch_pagoda.checkpoint.quantized_tensors import QuantizedFiles
from torch_pagoda.checkpoint.stored_tensors import of_files
from torch_pagoda.compiler import CheckpointFiles, CompileOptions
from torch_pagoda.compiler.compile import compile_program
from torch_pagoda.compiler.link import linker
from torch_pagoda.compiler.ranks.lead import program_of_rank
from torch_pagoda.compiler.warm_start.shipment import Shipment
from torch_pagoda.passes.graph.cut import ZERO, Cut, Refused
from torch_pagoda.passes.sharding.slices import part_of
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight, stored_parts

from tiny_models import build_tiny_model

OUTPUTS, INPUTS = 96, 192
ROWS = {
    "half": np.arange(48, 96),
    "runs": np.array([*range(3, 14), *range(40, 57), 80, ZERO, ZERO]),
    "nothing": np.array([ZERO] * 4),
}
COLUMNS = {"groups": np.arange(64, 160), "end": np.array([*range(128, 192), *[ZERO] * 32])}
IN_PARTS = [name for name in FORMATS if name.startswith(("gptq", "awq", "autoround"))]
OTHERS = ["ct-w4a16-asym", "ct-w4a16-order", "fp8-blocks", "slim-w4a8-g32"]


def module(name: str, folder: Path) -> QuantizedFiles:
    """The files of a checkpoint of one module in a format."""
    form = FORMATS[name]
    tensors, _ = form.store(torch.randn(OUTPUTS, INPUTS))
    file = str(folder / "model.safetensors")
    save_file({f"{MODULE}.{leaf}": tensor.contiguous() for leaf, tensor in tensors.items()}, file)
    if form.description:
        said = {f"{MODULE}.weight": form.description, "group_size": form.group_size}
        (folder / "quant_model_description.json").write_text(json.dumps(said))
    method = quantization_method({"quantization_config": form.config}, str(folder))
    assert method is not None
    return QuantizedFiles(str(folder), method, [file], of_files([file]), torch.float32, in_parts=True)


def cuts() -> list[list[Cut]]:
    rows = [Cut(0, (indices,)) for indices in ROWS.values()]
    columns = [Cut(1, (indices,)) for indices in COLUMNS.values()]
    return [*([cut] for cut in (*rows, *columns)), [rows[1], columns[0]], [columns[1], rows[0]]]


@pytest.mark.parametrize("name", [*IN_PARTS, *OTHERS])
def test_a_part_is_that_of_the_whole(name: str, tmp_path: Path) -> None:
    found = module(name, tmp_path).find(f"{MODULE}.weight")
    assert found is not None and not isinstance(found, torch.Tensor)
    whole = found.whole()
    assert found.shape == (OUTPUTS, INPUTS)
    for asked in cuts():
        part: torch.Tensor = whole
        try:
            for cut in asked:
                part = part_of(part, cut, 0)
        except Refused as error:
            with pytest.raises(Refused) as raised:
                found.part(asked)
            assert str(raised.value) == str(error)
            continue
        read = found.part(asked)
        assert isinstance(read, StoredWeight) and isinstance(part, StoredWeight)
        assert read.stored_as == part.stored_as
        assert torch.equal(read.dense(), part.dense())
        for own in stored_parts(read):
            mapped = not own.untyped_storage().resizable()
            assert mapped or own.untyped_storage().nbytes() == own.nbytes


@pytest.mark.parametrize("name", ["gptq-4-g32", "gptq-4-order", "awq"])
def test_codes_of_others_are_not_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unpacked of the codes and looked at of the scales is the part's."""
    files = module(name, tmp_path)
    read: list[int] = []
    held_of = quantized_tensors.Quantized.held_of

    def noted(self: Any, table: torch.Tensor, *sizes: Any) -> torch.Tensor:
        part = held_of(self, table, *sizes)
        read.append(part.numel() * 100 // table.numel())
        return part

    monkeypatch.setattr(quantized_tensors.Quantized, "held_of", noted)
    files.find(f"{MODULE}.weight").part([Cut(0, (ROWS["half"],))])  # type: ignore[union-attr]
    assert set(read) == {50}
    if "order" not in name:
        read.clear()
        files.find(f"{MODULE}.weight").part([Cut(1, (COLUMNS["groups"],))])  # type: ignore[union-attr]
        assert set(read) == {50}


class Kept(Exception):
    """What the other ranks are sent."""

    shipment: Shipment


class Others:
    """Other ranks, which do not run."""

    device = torch.device("cpu")

    def load(self, shipment: Shipment) -> None:
        kept = Kept()
        kept.shipment = shipment
        raise kept

    def lead(self, program: Any) -> Any:
        raise AssertionError


def held_bytes(objects: Iterable[Any]) -> int:
    """Memory of the tensors among objects that are not mapped from files."""
    storages = {}
    for each in objects:
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu":
            storage = each.untyped_storage()
            if storage.resizable():
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("name", ["gptq-4-order", "awq", "slim-w8a8-dynamic"])
def test_a_rank_holds_its_part_while_it_loads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = 8
    build_tiny_model("llama", num_hidden_layers=layers).save_pretrained(tmp_path)
    quantize_folder(tmp_path, name)
    files = checkpoint_files(tmp_path, "float32")
    assert files is not None
    model = load_model(tmp_path, "float32", False, torch.device("cpu"))
    codes = sum(p.stored_bytes for p in model.parameters() if isinstance(p, StoredWeight))
    options = CompileOptions(tensor_parallel_size=2, verify="off")
    with pytest.raises(Kept) as raised:
        compile_program(model, options, owns_weights=True, files=files, others=Others())  # type: ignore[arg-type]
    shipment = raised.value.shipment
    del model
    assert shipment.sources is not None and shipment.sources.stored
    most = 0

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **more: Any) -> Any:
            nonlocal most
            made = call(*given, **more)
            most = max(most, held_bytes(gc.get_objects()))
            return made

        return counted

    def loaded(from_files: CheckpointFiles) -> tuple[int, int]:
        """The most that is held while a rank loads, and what its program holds."""
        nonlocal most
        most = 0
        gc.collect()
        before = held_bytes(gc.get_objects())
        program = program_of_rank(shipment, 1, from_files, None)
        assert not program.has_stored_weights
        return most - before, held_bytes(program._args)

    monkeypatch.setattr(QuantizedFiles, "_weights", counting(QuantizedFiles._weights))
    monkeypatch.setattr(linker, "pack_rows", counting(linker.pack_rows))
    gc.collect()
    gc.freeze()  # objects that are there already are not looked at
    try:
        held, own = loaded(files)
        all_at_once, _ = loaded(replace(files, find=None))
    finally:
        gc.unfreeze()
    assert all_at_once > codes
    assert held < max(codes / 2, own) + 2 * codes / layers
