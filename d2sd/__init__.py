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
    from d2sd.errors import BundleError, CheckpointError, D2SDError, GenerationError, RequestError
    from d2sd.runtime.grammar.forms import StructuredOutputsParams
    from d2sd.runtime.sampling_params import SamplingParams
    from d2sd.serve.async_llm import AsyncLLM
    from d2sd.serve.completion import Completion, Logprob
    from d2sd.serve.errors import DeadlineExceeded, EngineFailed
    from d2sd.serve.llm import LLM
    from d2sd.serve.prompts import TextPrompt, TokensPrompt

    __version__: str

#: The public names, by their modules.
_MODULES = {
    "d2sd.errors": ("D2SDError", "BundleError", "CheckpointError", "GenerationError", "RequestError"),
    "d2sd.serve.async_llm": ("AsyncLLM",),
    "d2sd.serve.completion": ("Completion", "Logprob"),
    "d2sd.serve.errors": ("DeadlineExceeded", "EngineFailed"),
    "d2sd.serve.llm": ("LLM",),
    "d2sd.serve.prompts": ("TextPrompt", "TokensPrompt"),
    "d2sd.runtime.grammar.forms": ("StructuredOutputsParams",),
    "d2sd.runtime.sampling_params": ("SamplingParams",),
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "BundleError",
    "CheckpointError",
    "Completion",
    "D2SDError",
    "DeadlineExceeded",
    "EngineFailed",
    "GenerationError",
    "Logprob",
    "RequestError",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("d2sd")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
