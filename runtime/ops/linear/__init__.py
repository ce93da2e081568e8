"""Linear layers and the formats of their weights: packed, quantized, stored."""
