"""What the kernels of several ops share; none of it is an op."""
