"""Quantizes weights to 4 bits, calibrated on sample text."""

from __future__ import annotations

from .calibrate import CalibratedMatrix, calibrate

__all__ = ["CalibratedMatrix", "calibrate"]
