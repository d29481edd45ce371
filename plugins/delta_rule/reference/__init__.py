"""The specification in plain PyTorch: two forms of the gated delta rule, and the short convolution before it."""
