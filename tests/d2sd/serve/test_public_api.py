"""`import d2sd`: the public names, none of which costs a heavy import before it is used."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import d2sd


def test_importing_d2sd_loads_no_torch() -> None:
    code = (
        "import sys, d2sd; d2sd.__version__; d2sd.SamplingParams(); d2sd.RequestError; d2sd.DeadlineExceeded;"
        "print(*{'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_public_names() -> None:
    assert d2sd.__version__ == version("d2sd")
    assert set(d2sd.__all__) <= set(dir(d2sd))
    named = {name: module for module, names in d2sd._MODULES.items() for name in names}
    assert {*named, "__version__"} == set(d2sd.__all__)
    for name, module in named.items():
        assert getattr(d2sd, name).__module__ == module


def test_a_caller_can_catch_every_error_of_a_request() -> None:
    from d2sd.serve import errors

    for error in (d2sd.BundleError, d2sd.RequestError, d2sd.GenerationError, errors.QueueFull, errors.ShuttingDown):
        assert issubclass(error, d2sd.D2SDError)


def test_a_name_that_is_not_public() -> None:
    with pytest.raises(AttributeError, match="no attribute 'llm'"):
        _ = d2sd.llm
