"""Multi-head latent attention on an NPU."""
