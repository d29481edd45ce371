"""Copied into bundles as `trtllm/d2sd_trtllm/__init__.py`; TensorRT-LLM imports it there (`--custom_module_dirs`).

It needs the d2sd package next to TensorRT-LLM: `pip install --no-deps .` in a clone. Importing it registers d2sd's tree
for the bundle around it, or raises with the reasons why the installed TensorRT-LLM cannot have it.
"""

from importlib import import_module
from pathlib import Path

import_module("d2sd.integrations.trtllm.register").register(Path(__file__).resolve().parents[2])
