"""The specification in plain PyTorch, file by file that of `triton/`: what every implementation must return."""
