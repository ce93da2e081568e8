"""The CPU target: our kernels called one after the other, or compiled with inductor."""
