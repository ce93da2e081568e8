"""Planned sizes of steps: their choice, the device's limits, and padding."""
