"""The paged K/V write: `reference.py` is the specification, `triton/` the kernel, `cpu.py` the compiled library's."""

from d2sd.plugins.kv_pages.reference import write_pages

__all__ = ["write_pages"]
