"""The Ascend target: runs lowered graphs with torch_npu and torchair.

Importing this package imports neither of them.
"""
