"""Copied into bundles as `trtllm/d2sd_trtllm/__init__.py`; TensorRT-LLM imports it there (`--custom_module_dirs`).

It needs the d2sd package next to TensorRT-LLM: `pip install --no-deps .` in a clone. Importing it registers d2sd's tree
for the bundle around it, or raises with the reasons why the installed TensorRT-LLM cannot have it.
"""

from pathlib import Path

from d2sd.integrations.trtllm.register import register

register(Path(__file__).resolve().parents[2])
