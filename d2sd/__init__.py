"""d2sd: compile and serve speculative decoding with two block-diffusion drafters, losslessly.

    from d2sd import LLM, SamplingParams

    with LLM("bundles/smollm2-135m") as llm:
        print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}])[0].text)

The names below are imported on first use, so `import d2sd` loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d2sd.serve.llm import LLM, Completion
    from d2sd.serve.params import SamplingParams
    from d2sd.serve.structured import StructuredOutputsParams

    __version__: str

__all__ = ["LLM", "Completion", "SamplingParams", "StructuredOutputsParams", "__version__"]

_MODULES = {
    "LLM": "d2sd.serve.llm",
    "Completion": "d2sd.serve.llm",
    "SamplingParams": "d2sd.serve.params",
    "StructuredOutputsParams": "d2sd.serve.structured",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("d2sd")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
