"""The former place of `d2sd.io.check_writable` and `d2sd.io.write_text`."""

from d2sd.io import check_writable as check_writable
from d2sd.io import write_text as write_whole

__all__ = ["check_writable", "write_whole"]
