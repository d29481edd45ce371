from d2sd.plugins.kv_pages.op import write_rows

__all__ = ["write_rows"]
