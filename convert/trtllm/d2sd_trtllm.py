"""Copied into bundles as `trtllm/d2sd_trtllm/__init__.py`; TensorRT-LLM imports it there (`--custom_module_dirs`).

It needs the d2sd package, without its dependencies: `pip install --no-deps .` in a clone. If d2sd is missing, or the
installed TensorRT-LLM is outside the supported versions, the server drafts with the first drafter only and logs it.
`D2SD_TRTLLM=require` makes this an error.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

try:
    _register = import_module("d2sd.integrations.trtllm.register").register
except ImportError as error:
    if os.environ.get("D2SD_TRTLLM") == "require":
        raise
    sys.stderr.write(f"d2sd: LINEAR DFlash with the first drafter alone: d2sd cannot be imported here ({error})\n")
else:
    _register(Path(__file__).resolve().parents[2])
