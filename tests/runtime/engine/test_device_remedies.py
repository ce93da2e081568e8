from __future__ import annotations

import re

import pytest

from torch_pagoda.runtime.npu_errors import error_table as device_error_table
from torch_pagoda.runtime.npu_errors import remedies as device_remedies
from torch_pagoda.runtime.npu_errors.device_lost import DeviceLost, lost_reason
from torch_pagoda.runtime.npu_errors.error_table import REMEDIES
from torch_pagoda.runtime.npu_errors.remedies import DeviceError, explain, explained_errors

# As torch_npu and CANN write them.
OUT_OF_MEMORY = (
    "NPU out of memory. Tried to allocate 72.00 MiB (NPU 0; 61.27 GiB total capacity; 56.05 GiB already allocated; "
    "5.04 MiB free). If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
)
VECTOR = (
    "ACL stream synchronize failed, error code:507035\n"
    "EZ9999: Inner Error!\nEZ9999[PID: 164243] 2026-04-14-06:40:35 (EZ9999): The error from device(chipId:0, dieId:1)"
)
SCHEDULER = (
    "copy_d2d:torch_npu/csrc/aten/common/CopyKernel.cpp:274 NPU function error: "
    "c10_npu::acl::AclrtSynchronizeStreamWithTimeout(copy_stream), error code is 507001\n[ERROR] 2025-02-20"
)
SET_UP = (
    "[ERROR] RecentErrMsg: [PID: 1613532] 2026-03-24-12:14:45 Memory_Allocation_Failure(EL0004): Failed to allocate."
)
TIMEOUT = "EI0002: [PID: 9] 2026-05-02-10:00:00 Communication_Error_Timeout(EI0002): the Notify register waits"
CONNECT = "call HcclCommInitRootInfo failed\nEI0006[PID: 5] 2026-05-02 wait socket establish timeout"


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (OUT_OF_MEMORY, "", "the device is out of memory; lower kv_cache_memory, num_blocks"),
        (VECTOR, "507035", "failed on the vector cores .507035.; restart the process"),
        (SCHEDULER, "507001", "expandable_segments:False"),
        (SET_UP, "EL0004", "could not allocate memory"),
        (TIMEOUT, "EI0002", "raise HCCL_EXEC_TIMEOUT"),
        (CONNECT, "EI0006", "raise HCCL_CONNECT_TIMEOUT"),
        ("aclnnInplaceCopy failed, ERROR_CODE:561003", "561003", "kernel of an operator is not installed"),
        ("rtStreamSynchronize failed, ret=507035", "507035", "failed on the vector cores"),
    ],
)
def test_an_error_gets_words_and_a_remedy(message: str, code: str, words: str) -> None:
    original = RuntimeError(message)
    with pytest.raises(DeviceError, match=words) as raised, explained_errors():
        raise original
    assert raised.value.code == code and raised.value.__cause__ is original
    assert message.splitlines()[0] in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape [507035] is invalid"),  # a number, and no code
        RuntimeError("error code is 5070351"),
        RuntimeError("error code is 999999"),  # not in the table
        RuntimeError("XEI0002: no"),
        RuntimeError(""),
        RuntimeError("x" * 70000 + " error code is 507035"),  # past what is read
        ValueError("error code is 507035"),  # of the caller, not of the device
        DeviceError("NPU out of memory", ""),
        RuntimeError("synchronize failed, error code is 507010"),  # the device is lost
        DeviceLost("the device is lost (error code is 507035)"),
    ],
)
def test_other_errors_are_left_as_they_are(error: Exception) -> None:
    assert explain(error) is error
    with pytest.raises(type(error)) as raised, explained_errors():
        raise error
    assert raised.value is error and raised.value.__cause__ is None


def test_a_number_comes_before_the_code_of_the_module_that_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "EL0004: no memory\nerror code is 507015"
    found = explain(RuntimeError(message))
    assert isinstance(found, DeviceError) and found.code == "507015"
    # Without the pattern of numbers the module's code would be named: the test sees the difference.
    monkeypatch.setattr(device_remedies, "reported_codes", lambda message: [])
    mutant = explain(RuntimeError(message))
    assert isinstance(mutant, DeviceError) and mutant.code == "EL0004"


def test_the_table_names_a_source_for_every_row() -> None:
    sources = set(re.findall(r"\[(\w+)\]", device_error_table.__doc__ or ""))
    for code, row in REMEDIES.items():
        assert re.fullmatch(r"\d{6}|E[A-Z1]\d{4}", code) and row.source in sources
        assert row.meaning and row.remedy and not row.meaning.endswith(".") and not row.remedy.endswith(".")


def test_no_explanation_sounds_like_a_lost_device() -> None:
    """``lost_reason`` reads the words of what is raised, too."""
    for code in REMEDIES:
        explained = explain(RuntimeError(f"error code is {code}" if code.isdigit() else f"{code}: Inner Error!"))
        assert isinstance(explained, DeviceError) and lost_reason(explained) is None
