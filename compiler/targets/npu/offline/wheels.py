"""The torch-npu wheels that the offline toolchain may install: versions and checksums, as published on PyPI.

A torch-npu wheel is compiled against one torch release and one Python. Each entry is the last build for its torch;
the checksums are those that https://pypi.org/project/torch-npu/#files shows for manylinux_2_28_x86_64.
"""

from __future__ import annotations

from dataclasses import dataclass


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


# torchair reads and writes GE graphs as protobuf messages; torch-npu does not declare that it needs the package.
# (PyYAML, which it does declare, comes with transformers.) The wheel's ABI is that of every Python from 3.10 on.
PROTOBUF = Requirement("protobuf", "7.36.2", "89f23aa53c24553a2416fd4fd1ec06f74fa42b14b546d8883128813f775bbfd2")

# torch release → (torch-npu version, Python tag → checksum of its wheel).
TORCH_NPU: dict[str, tuple[str, dict[str, str]]] = {
    "2.11.0": (
        "2.11.0.post3",
        {
            "cp311": "7489f67010989c56ed39deb6e25cb809c4d2cc99e7cc3426386e044c4ee8b55d",
            "cp312": "d1fe63be65c5c8af588bf0aae75c15bc51c183e3d4a093b130c1e2f357feb5e7",
            "cp313": "0264928185091c11b79c0670df990c4aab8e1f775ca24c52a644ed3245bbca1d",
            "cp314": "1f46fa39eed5f91fdcfda6809429fd24b0b265fae4ec8b84fe00c03552deea6e",
        },
    ),
    "2.12.0": (
        "2.12.0.post3",
        {
            "cp311": "70776a5afc58c3291efb38bcce8a83284fb3285758bd4472b9d47841788a2be1",
            "cp312": "3173b1e960216c5fa1ecbece6dde9537087cc313692f89ff0fe17b59ca3fdd57",
            "cp313": "b49b6317ca740e3ebf94f9918b92097ba624b870237015b3c16210ba3d8eed3f",
            "cp314": "d5f521f7d7bc12e15ec1af588f496020cfdc1b70fa1a5a93f946bf20c487416e",
        },
    ),
    "2.13.0": (
        "2.13.0",
        {
            "cp311": "0deb809cf447d3fce636ccfdc9c9f874950f1fe76f18f4aaab31e2d345f7dac0",
            "cp312": "f27cf44167b6e0a4b8cf82097c688d2bf532edf503d3e5d6a7ced80a7e759ea6",
            "cp313": "20441bfb56c4054a427560ff413fa033db921b993e06c3d67d0f7edc23d40513",
            "cp314": "60ea931e36e8f61ab350ef33c6114805068e7dd15b8a28f34f4704ac05089d58",
        },
    ),
}
