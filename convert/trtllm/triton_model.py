"""Copied into bundles as `trtllm/triton/model.py`: TensorRT-LLM's `llmapi` model for Triton, with d2sd's tree.

It goes in place of `1/model.py` in a copy of `llmapi/tensorrt_llm` from TensorRT-LLM's images, whose own file becomes
`1/llmapi_model.py`. `D2SD_BUNDLE` names the bundle (docs/tensorrt-llm.md).
"""

import os
import sys
from importlib import import_module
from pathlib import Path

if "D2SD_BUNDLE" not in os.environ:
    raise import_module("d2sd.errors").D2SDError(
        "The bundle is not known.", where="D2SD_BUNDLE", found="not set", fix="set it to the bundle's folder"
    )
import_module("d2sd.integrations.trtllm.register").register(Path(os.environ["D2SD_BUNDLE"]).resolve())
sys.path.insert(0, str(Path(__file__).resolve().parent))
#: The name that Triton looks for.
TritonPythonModel = import_module("llmapi_model").TritonPythonModel
