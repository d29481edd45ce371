"""Copied into bundles as `trtllm/triton/model.py`: TensorRT-LLM's `llmapi` model for Triton, with d2sd's tree.

It goes in place of `1/model.py` in a copy of `llmapi/tensorrt_llm` from TensorRT-LLM's images, whose own file becomes
`1/llmapi_model.py`. `D2SD_BUNDLE` names the bundle (docs/tensorrt-llm.md).
"""

import os
import sys
from pathlib import Path

from d2sd.integrations.trtllm.register import register

_FOLDER = Path(__file__).resolve().parent
register(Path(os.environ["D2SD_BUNDLE"]).resolve())
sys.path.insert(0, str(_FOLDER))

from llmapi_model import TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
