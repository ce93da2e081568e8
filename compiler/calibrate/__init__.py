"""Rounding weights to 4 bits with the help of sample text."""

from __future__ import annotations

from .calibrate import CalibratedMatrix, calibrate

__all__ = ["CalibratedMatrix", "calibrate"]
