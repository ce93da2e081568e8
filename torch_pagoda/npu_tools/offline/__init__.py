"""The real torch_npu and torchair without a device: their set-up, and what they make of a graph."""
