"""The torch-npu wheels of the offline toolchain: versions and checksums, as published on PyPI.

A torch-npu wheel is built for one torch release, one Python and one architecture. Each entry is the last build for
its torch; the checksums are those of https://pypi.org/simple/torch-npu/ for manylinux_2_28.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MACHINES", "PROTOBUF", "TORCH_NPU", "TRIED", "Requirement", "TorchNpu"]


@dataclass(frozen=True)
class Requirement:
    """A pinned wheel.

    Attributes:
        name: name of the distribution.
        version: its exact version.
        sha256: checksum of the wheel, hexadecimal.
    """

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


@dataclass(frozen=True)
class TorchNpu:
    """The torch-npu wheels for one torch release.

    Attributes:
        version: version of torch-npu.
        sha256: architecture, as ``platform.machine()`` names it → tag of the Python, like cp311 → checksum.
    """

    version: str
    sha256: Mapping[str, Mapping[str, str]]


MACHINES = ("x86_64", "aarch64")
"""Architectures with wheels, as ``platform.machine()`` names them."""

TRIED = ("2.13.0", "x86_64")
"""The torch release and the architecture that the tests convert with; the others are pinned but untested.

PyPI has no build of torch 2.14 without CUDA: its Linux wheels, also for aarch64, are CUDA builds; a machine with
torch 2.14 from elsewhere gets torch-npu 2.14.0.
"""

# torchair reads and writes GE graphs as protobuf messages; torch-npu does not declare that it needs the package.
# (PyYAML, which it does declare, comes with transformers.) The wheel's ABI is that of every Python from 3.10 on.
PROTOBUF = {
    "x86_64": Requirement("protobuf", "7.36.2", "89f23aa53c24553a2416fd4fd1ec06f74fa42b14b546d8883128813f775bbfd2"),
    "aarch64": Requirement("protobuf", "7.36.2", "e11e1f0180583a2af89db6a2ecd9e8dc40aa6d2988ca175bfd0e6d12ea72d74e"),
}

# torch release → torch-npu.
TORCH_NPU: dict[str, TorchNpu] = {
    "2.11.0": TorchNpu(
        "2.11.0.post3",
        {
            "x86_64": {
                "cp311": "7489f67010989c56ed39deb6e25cb809c4d2cc99e7cc3426386e044c4ee8b55d",
                "cp312": "d1fe63be65c5c8af588bf0aae75c15bc51c183e3d4a093b130c1e2f357feb5e7",
                "cp313": "0264928185091c11b79c0670df990c4aab8e1f775ca24c52a644ed3245bbca1d",
                "cp314": "1f46fa39eed5f91fdcfda6809429fd24b0b265fae4ec8b84fe00c03552deea6e",
            },
            "aarch64": {
                "cp311": "30da6f628cf87095843d1b432401ded34c5e7345089ed1303b9980ca7fd5f177",
                "cp312": "7d1284333a63671da1df222a1185f3997eafcaa533fe3d9e4aacad556eb27e04",
                "cp313": "7fcc5ed00e9b4a0827b14ed392f3586b81119b4b3678e317860d44d3f2c6ff3b",
                "cp314": "e2695af5f4eccde18e7d33ceba0847c3fbd1ebe869a51a55649e0e822fa58ba2",
            },
        },
    ),
    "2.12.0": TorchNpu(
        "2.12.0.post3",
        {
            "x86_64": {
                "cp311": "70776a5afc58c3291efb38bcce8a83284fb3285758bd4472b9d47841788a2be1",
                "cp312": "3173b1e960216c5fa1ecbece6dde9537087cc313692f89ff0fe17b59ca3fdd57",
                "cp313": "b49b6317ca740e3ebf94f9918b92097ba624b870237015b3c16210ba3d8eed3f",
                "cp314": "d5f521f7d7bc12e15ec1af588f496020cfdc1b70fa1a5a93f946bf20c487416e",
            },
            "aarch64": {
                "cp311": "2a4a605404021689af7b13dd676651b151130c49326fc7054ed58fe4884e5d33",
                "cp312": "d553e741081ca9cbc672175281b486c9c3b06676928590087f9afa70f0bceb6b",
                "cp313": "7f9a1492527d85871c757642461710f9cd167a4771b00c9e42b21857afa0f4c7",
                "cp314": "e6ee2f06fb62c04188a02e713d1a4a50f856e057ecdd0c5d14961dab16ff168e",
            },
        },
    ),
    "2.13.0": TorchNpu(
        "2.13.0",
        {
            "x86_64": {
                "cp311": "0deb809cf447d3fce636ccfdc9c9f874950f1fe76f18f4aaab31e2d345f7dac0",
                "cp312": "f27cf44167b6e0a4b8cf82097c688d2bf532edf503d3e5d6a7ced80a7e759ea6",
                "cp313": "20441bfb56c4054a427560ff413fa033db921b993e06c3d67d0f7edc23d40513",
                "cp314": "60ea931e36e8f61ab350ef33c6114805068e7dd15b8a28f34f4704ac05089d58",
            },
            "aarch64": {
                "cp311": "d0e64a90b3e640b0274511e47c65284d3a7dedae5f6ad2b95d91de12ff9a29ff",
                "cp312": "ebb895735bf3c347e8c971c3f9083bb5ec032a1b139876ce019f03ee408d81fa",
                "cp313": "359a055deaf9b94de35ffadff2e68e9fb4a3b3576796ed3617e85d16a42df259",
                "cp314": "26ce9c45eb340bb9eec7ca5e78102ac1759d63aa7d66adf7c0fcafdeb221c84e",
            },
        },
    ),
    "2.14.0": TorchNpu(
        "2.14.0",
        {
            "x86_64": {
                "cp311": "7736f7d82cf9f16c7dfc4537f7e7c638153da760273a193455e70857f912189e",
                "cp312": "e920a8cdd1aec09baaacba428144aff38cef889e09746360a4fed00b5de9c077",
                "cp313": "e577c4990e3757cdad322f5be48e725b81b594dd8f26787336fac6cc5bd10a2a",
                "cp314": "ecce6be9b356a53da6362762def458a4b8615cf860573c33c4a1fc1bfde2e1a1",
            },
            "aarch64": {
                "cp311": "fa4c9782c003938dc70f073597b18539a170026cacc4645e33af7433f73e406b",
                "cp312": "67c47e96a8fe83e299b3ef0bcd4310321901433b6970ad377e2aef37416d6db3",
                "cp313": "025eafbb24652bbc53eec0383fad95acb560abe016a6f033a9d871ebc551d50d",
                "cp314": "86a6f17b4fbdc88c63aa8206a16cabfb9897c8dde707ae7be43b1c0998059661",
            },
        },
    ),
}
