"""Helpers that several ops share; none of it is an op.

arrivals.py          programs that store parts, and the last of them, which reads all
dependent_launch.py  kernels that start while the one before still runs
fp8.py               rounding to FP8 and back, in PyTorch
kernels.py           functions that kernels call: sorted lists, and the same rounding
prefetch.py          memory that is asked for before a kernel waits
"""
