"""Errors of Ascend devices with a meaning and a remedy, as data with sources.

Sources:

- [rt] ``acl/error_codes/rt_error_codes.h`` of CANN 8.5.0, names and meanings, as docs.rs/cann-sys/0.1.3 lists them
- [nn] "aclnn Return Codes", CANN 9.1.0 (hiascend.com, atlasascendc_api_07_1205)
- [ec] the pages of error codes, CANN 9.0.0 (hiascend.com, atlaserrorcode_15_*)
- [hccl] the HCCL user guide, CANN 9.0.0 (hiascend.com, hcclug_000024, hcclug_000050)
- [op] docs/en/error_code of gitcode.com/cann/opbase
- [116] github.com/vllm-project/vllm-ascend/issues/116
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OUT_OF_MEMORY", "REMEDIES", "Remedy"]


@dataclass(frozen=True)
class Remedy:
    """What an error code says and what to do.

    Attributes:
        meaning: what has happened.
        remedy: what the user can do.
        source: key of the source in this module's docstring.
    """

    meaning: str
    remedy: str
    source: str


_LESS = (
    "lower kv_cache_memory, num_blocks or max_num_batched_tokens, or quantize the weights; npu-smi info shows "
    "other processes that use memory of this device"
)
_SUPPORT = "restart the process; if the error recurs, send the logs in ~/ascend/log to the vendor's support"
_OPERATOR = (
    "restart the process, the device's context is lost; ASCEND_LAUNCH_BLOCKING=1 with codegen='none' shows the "
    "operator, pagoda bisect MODEL --target npu --codegen none the pass"
)
_STREAMS = "capture fewer sizes, or use codegen='ge' or codegen='none'"
_DRIVER = "pagoda npu doctor compares driver, CANN and torch_npu"

OUT_OF_MEMORY = Remedy("the device is out of memory", _LESS, "rt")
"""Of torch_npu's own allocator, whose error has no code."""

REMEDIES: dict[str, Remedy] = {
    "107002": Remedy("the thread has no context on the device", _SUPPORT, "rt"),
    "107020": Remedy("a task timed out", _OPERATOR, "rt"),
    "207000": Remedy("this driver or chip does not support the feature", _DRIVER, "rt"),
    "207001": Remedy("memory could not be allocated", _LESS, "rt"),
    "207004": Remedy("there is no such device", "pagoda npu doctor shows which are visible", "rt"),
    "207005": Remedy("a resource of the device is exhausted", _STREAMS, "rt"),
    "207006": Remedy("this user may not use the device", "pagoda npu doctor names the required group", "rt"),
    "207007": Remedy("the device has no events left", _STREAMS, "rt"),
    "207008": Remedy("the device has no streams left", _STREAMS, "rt"),
    "207018": Remedy("the device is out of memory", _LESS, "rt"),
    "507001": Remedy(
        "the task scheduler of the device reports an internal error",
        "restart the process, with PYTORCH_NPU_ALLOC_CONF=expandable_segments:False if the error recurs",
        "116",
    ),
    "507008": Remedy("the binary was compiled for another chip", _DRIVER, "rt"),
    "507011": Remedy("a graph failed while it ran", _OPERATOR, "rt"),
    "507014": Remedy("an operator on the cube cores timed out", _OPERATOR, "rt"),
    "507015": Remedy("an operator failed on the cube cores", _OPERATOR, "rt"),
    "507017": Remedy("an operator on the device's processors timed out", _OPERATOR, "rt"),
    "507018": Remedy("an operator failed on the device's processors", _OPERATOR, "rt"),
    "507033": Remedy(
        "the device could not be set up", "check for other processes that use its memory: npu-smi info", "rt"
    ),
    "507034": Remedy("an operator on the vector cores timed out", _OPERATOR, "rt"),
    "507035": Remedy("an operator failed on the vector cores", _OPERATOR, "rt"),
    "507046": Remedy("the device did not finish its work in time", _OPERATOR, "rt"),
    "507899": Remedy("the driver reports an internal error, often after another error", _SUPPORT, "rt"),
    "561002": Remedy("an operator could not be tiled for these shapes", _OPERATOR, "nn"),
    "561003": Remedy(
        "the kernel of an operator is not installed", "install the CANN ops package of this chip and version", "nn"
    ),
    "EE1006": Remedy("this version of CANN, the driver or the chip does not support the feature", _DRIVER, "ec"),
    "EI0002": Remedy(
        "devices waited for each other longer than HCCL_EXEC_TIMEOUT",
        "look for the first error of the other processes; raise HCCL_EXEC_TIMEOUT if they are only slow",
        "ec",
    ),
    "EI0006": Remedy(
        "devices could not connect within HCCL_CONNECT_TIMEOUT",
        "check that every process has started and that the network works, or raise HCCL_CONNECT_TIMEOUT",
        "hccl",
    ),
    "EI0007": Remedy("communication between devices is out of memory", _LESS, "ec"),
    "EI9999": Remedy("the communication library reports an internal error", _SUPPORT, "hccl"),
    "EL0004": Remedy("the driver could not allocate memory", _LESS, "ec"),
    "EZ9903": Remedy("a call of the operator library failed in the runtime", _OPERATOR, "op"),
    "EZ9999": Remedy("an operator reports an internal error", _OPERATOR, "op"),
    "E19999": Remedy("the graph engine stopped with an internal error", "use codegen='aclgraph' or 'none'", "ec"),
}
"""Numbers of the runtime and of the operator library, and codes of CANN's modules."""
