"""Head sizes that the CUDA kernels take; a plan refuses others for engines before anything is built."""

from __future__ import annotations

#: Multiples of this, the smallest K of a tensor-core product, up to LARGEST_HEAD.
HEAD_STEP = 16
LARGEST_HEAD = 256
#: Of attention between PyTorch's layers, over pages in 16 bits (Gemma 4).
LARGEST_UNFUSED = 512
