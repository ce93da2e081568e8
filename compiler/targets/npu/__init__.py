"""The Ascend target: the real torch_npu and torchair run without a device, and what they make of lowered graphs.

Importing this package imports neither of them.
"""
