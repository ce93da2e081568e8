"""Lowering to Ascend NPUs: canonical operators become ``npu::`` ones, each call held against the table of limits."""
