from d2sd.plugins.kv_pages.reference import write_rows

__all__ = ["write_rows"]
