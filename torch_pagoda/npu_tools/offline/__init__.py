"""The real torch_npu and torchair without a device: setup, and conversion of graphs."""
