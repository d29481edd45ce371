"""Helpers that several ops share; none of it is an op.

fp8.py       rounding to FP8 and back, in PyTorch
kernels.py   functions that kernels call: sorted lists, and the same rounding
"""
