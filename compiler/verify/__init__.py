"""Comparisons of what was compiled with the model, and what they leave behind when one fails."""
