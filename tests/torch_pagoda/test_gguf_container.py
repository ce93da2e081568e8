"""Heads of GGUF files are believed only after they are checked: whatever is broken is named."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import Gguf, Stored, Typed, all_of, file_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_pagoda.checkpoint.gguf.checkpoint import open_gguf
from torch_pagoda.checkpoint.gguf.container import BadGguf, read_gguf

from tiny_models import build_tiny_model


def small() -> Gguf:
    metadata = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.rope.freq_base": 10000.0,
        "a.flag": True,
        "a.list": [1, 2, 3],
        "a.texts": ["one", "two"],
        "a.lists": [["one"], ["two", "three"]],
        "a.long": Typed(10, 1 << 40),
        "a.negative": -3,
    }
    matrix = Stored("token_embd.weight", (3, 32), "Q8_0", bytes(3 * 34))
    return Gguf(metadata, [matrix, Stored("output_norm.weight", (32,), "F32", bytes(128))])


def test_a_head_is_read_as_it_was_written(tmp_path: Path) -> None:
    for version in (2, 3):
        written = small()
        written.version = version
        found = read_gguf(written.write(tmp_path / "model.gguf"))
        assert found.version == version
        assert found.metadata == {
            key: value.value if isinstance(value, Typed) else value for key, value in written.metadata.items()
        }
        matrix, norm = found.tensors.values()
        assert (matrix.shape, matrix.type.name, matrix.nbytes) == ((3, 32), "Q8_0", 102)
        assert (norm.shape, norm.type.name, norm.nbytes) == ((32,), "F32", 128)
        assert norm.begin - matrix.begin == 128 and matrix.begin % 32 == 0


def put(at: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda file: file[:at] + data + file[at + len(data) :]


def put_after(text: str, data: bytes) -> Callable[[bytes], bytes]:
    """Writes over what follows the first occurrence of a text."""

    def change(file: bytes) -> bytes:
        at = file.index(text.encode()) + len(text)
        return file[:at] + data + file[at + len(data) :]

    return change


def without(key: str) -> Callable[[Gguf], object]:
    return lambda file: file.metadata.pop(key)


def entry(key: str, value: Any) -> Callable[[Gguf], object]:
    return lambda file: file.metadata.update({key: value})


def offset(name: str, at: int) -> Callable[[Gguf], object]:
    return lambda file: file.offsets.update({name: at})


HUGE = struct.pack("<Q", 1 << 62)
BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another file": (put(0, b"PK\3\4"), "does not begin with 'GGUF'"),
    "nothing": (lambda file: b"", "0 bytes"),
    "its first bytes": (lambda file: file[:20], "20 bytes"),
    "version 1": (put(4, struct.pack("<I", 1)), "version 1 of GGUF"),
    "version 4": (put(4, struct.pack("<I", 4)), "version 4 of GGUF"),
    "big-endian": (put(4, struct.pack(">I", 3)), "big-endian"),
    "too many tensors": (put(8, HUGE), "4611686018427387904 tensors"),
    "too many entries": (put(16, HUGE), "4611686018427387904 entries"),
    "one entry more": (put(16, struct.pack("<Q", 10)), "cannot be read as GGUF"),
    "a long key": (put(24, HUGE), "4611686018427387904 bytes"),
    "a type that is not known": (put_after("a.flag", struct.pack("<I", 77)), "'a.flag': its type is number 77"),
    "a bool of 2": (put_after("a.flag", struct.pack("<IB", 7, 2)), "a bool in it is 2"),
    "a long array": (put_after("a.list", struct.pack("<IIQ", 9, 4, 1 << 62)), "'a.list': it announces"),
    "a long array of texts": (put_after("a.texts", struct.pack("<IIQ", 9, 8, 1 << 62)), "'a.texts': it announces"),
    "no UTF-8": (put_after("general.architecture", struct.pack("<IQ", 8, 5) + b"\xff\xfe"), "not UTF-8"),
    "5 dims": (put_after("token_embd.weight", struct.pack("<I", 5)), "it has 5 dims"),
    "no dims": (put_after("token_embd.weight", struct.pack("<I", 0)), "it has 0 dims"),
    "huge dims": (put_after("token_embd.weight", struct.pack("<IQQ", 2, 1 << 40, 1 << 40)), "its dims are"),
    "an empty dim": (put_after("token_embd.weight", struct.pack("<IQQ", 2, 32, 0)), "its dims are"),
    "half a block": (put_after("token_embd.weight", struct.pack("<IQQ", 2, 33, 3)), "not whole blocks of 32"),
    "more rows": (put_after("token_embd.weight", struct.pack("<IQQ", 2, 32, 4)), "overlaps 'token_embd.weight'"),
    "many more rows": (put_after("token_embd.weight", struct.pack("<IQQ", 2, 32, 400)), "is truncated"),
    "another type": (put_after("token_embd.weight", struct.pack("<IQQI", 2, 32, 3, 99)), "its type is number 99"),
    "a byte less": (lambda file: file[:-1], "is truncated"),
    "half of it": (lambda file: file[: len(file) // 2], "download it again"),
}


@pytest.mark.parametrize("case", BYTES)
def test_broken_bytes_are_named(case: str, tmp_path: Path) -> None:
    change, words = BYTES[case]
    file = tmp_path / "model.gguf"
    file.write_bytes(change(small().encoded()))
    with pytest.raises(BadGguf) as error:
        read_gguf(file)
    message = str(error.value)
    assert message.startswith("model.gguf") and words in message and "\n" not in message, message


CHANGES: dict[str, tuple[Callable[[Gguf], object], str]] = {
    "alignment of 3": (entry("general.alignment", 3), "not a power of two"),
    "alignment of 0": (entry("general.alignment", 0), "not a power of two"),
    "alignment in words": (entry("general.alignment", "wide"), "not a power of two"),
    "an offset between": (offset("output_norm.weight", 130), "not a multiple of the file's alignment, 32"),
    "an offset beyond": (offset("output_norm.weight", 1 << 40), "is truncated"),
    "one over the other": (
        offset("output_norm.weight", 96),
        "'output_norm.weight': it overlaps 'token_embd.weight'",
    ),
    "the same place": (offset("output_norm.weight", 0), "overlaps"),
    "deep arrays": (entry("a.lists", [[[[[[1]]]]]]), "arrays nested more than 4 deep"),
    "a name of nothing": (entry("", 1), "is empty"),
    "a name with a bell": (entry("a\7", 1), "not printable"),
    "a tensor twice": (lambda file: file.tensors.append(file.tensors[0]), "it occurs twice"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_contradictions_are_named(case: str, tmp_path: Path) -> None:
    change, words = CHANGES[case]
    written = small()
    change(written)
    with pytest.raises(BadGguf) as error:
        read_gguf(written.write(tmp_path / "model.gguf"))
    assert words in str(error.value)


def test_a_file_that_is_cut_after_its_head_was_read(tmp_path: Path) -> None:
    file = small().write(tmp_path / "model.gguf")
    found = read_gguf(file)
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(BadGguf, match="its size has changed"):
        found.mapped()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    """The bytes of a model's file, and where mutants of it may be written."""
    written = file_of(build_tiny_model("llama", num_hidden_layers=1), all_of("Q4_0"))
    written.metadata["tokenizer.ggml.tokens"] = ["a", "b"]
    return written.encoded(), tmp_path_factory.mktemp("mutants") / "model.gguf"


NUMBERS = st.sampled_from([0, 1, 2, 7, 8, 9, 31, 32, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62])
MUTATIONS = st.one_of(
    st.tuples(st.just("number"), st.integers(0, 2600), NUMBERS, st.sampled_from("BIQ")),
    st.tuples(st.just("cut"), st.integers(0, 1 << 17), st.just(0), st.just("B")),
    st.tuples(st.just("insert"), st.integers(0, 2600), st.integers(0, 255), st.just("B")),
    st.tuples(st.just("remove"), st.integers(0, 2600), st.integers(1, 40), st.just("B")),
)


def mutated(file: bytes, mutations: list[tuple[str, int, int, str]]) -> bytes:
    for kind, at, number, form in mutations:
        if kind == "number":
            data = struct.pack(f"<{form}", number & ((1 << 8 * struct.calcsize(f"<{form}")) - 1))
            file = file[:at] + data + file[at + len(data) :]
        elif kind == "cut":
            file = file[:at]
        elif kind == "insert":
            file = file[:at] + bytes([number]) + file[at:]
        else:
            file = file[:at] + file[at + number :]
    return file


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=400)
@given(mutations=st.lists(MUTATIONS, min_size=1, max_size=3))
def test_mutants_are_read_or_refused(model: tuple[bytes, Path], mutations: list[tuple[str, int, int, str]]) -> None:
    """Nothing but the error that is meant for it; what is read has the sizes that the file says."""
    data, path = model
    path.unlink(missing_ok=True)
    path.write_bytes(mutated(data, mutations))
    try:
        found = open_gguf(path)
        tensors = dict(found.tensors(torch.float32))
        found.config()
    except BadGguf as error:
        assert str(error).startswith("model.gguf") and "\n" not in str(error).strip()
        return
    assert tensors["model.embed_tokens.weight"].shape[1] == found.sizes.of["h"]
