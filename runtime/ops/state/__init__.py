"""Operators with a recurrent or convolutional state per sequence."""
