"""Helpers that several ops share; none of it is an op.

fp8.py          rounding to FP8 and back, in PyTorch
fp8_triton.py   the same inside kernels
order.py        sorted lists of scores inside kernels
sizes.py        sizes that a launch rounds
"""
