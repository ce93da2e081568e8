"""Linear layers and how their weights are held: packed, quantized, as stored."""
