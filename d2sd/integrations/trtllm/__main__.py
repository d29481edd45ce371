"""Registers d2sd's tree for a bundle, then runs a Python module: for servers that cannot import modules themselves.

python -m d2sd.integrations.trtllm BUNDLE dynamo.trtllm --model-path target ...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from d2sd.errors import D2SDError
from d2sd.integrations.trtllm.register import register

_USAGE = "usage: python -m d2sd.integrations.trtllm BUNDLE MODULE [arguments of the module]"


def main() -> None:
    """Exit with code 2 where the tree cannot be registered."""
    if len(sys.argv) < 3:
        sys.exit(_USAGE)
    bundle, module = Path(sys.argv[1]), sys.argv[2]
    try:
        register(bundle.resolve())
    except D2SDError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
