"""Weights of a lowered graph, laid out as the operators of Ascend read them."""
