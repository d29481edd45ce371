"""`import d2sd`: five names, none of which costs a heavy import before it is used."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import d2sd


def test_importing_d2sd_loads_no_torch() -> None:
    code = (
        "import sys, d2sd; d2sd.__version__; d2sd.SamplingParams;"
        "print(*{'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_public_names() -> None:
    assert d2sd.__version__ == version("d2sd")
    assert {"LLM", "SamplingParams", "Completion"} <= set(dir(d2sd))
    assert d2sd.LLM.__module__ == "d2sd.serve.llm"
    with pytest.raises(AttributeError, match="no attribute 'llm'"):
        _ = d2sd.llm
