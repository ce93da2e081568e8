"""The CPU target: our kernels called one after the other, or inductor around them."""
