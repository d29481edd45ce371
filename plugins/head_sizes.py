"""Head sizes that the attention kernels take, on every device; a plan refuses others before anything is built."""

from __future__ import annotations

#: Multiples of this, the smallest K of a tensor-core product, up to LARGEST_HEAD.
HEAD_STEP = 16
LARGEST_HEAD = 256
