"""The Triton that the suite runs: the machine's, or in front of one that the kernels refuse what `gpu_pack.sh` brought.

python -m benchmarks.gpu.brought FOLDER    # prints FOLDER where it is to be put in front, and why on stderr
"""

from __future__ import annotations

import sys
from importlib import metadata

from packaging.version import Version

from d2sd.plugins.dispatch import FENCED_TRITON

#: Names the folder to the suite, whose record says where its Triton came from.
VARIABLE = "D2SD_BROUGHT_TRITON"


def triton_of(path: list[str] | None = None) -> metadata.Distribution | None:
    """The first Triton of these folders, by default of `sys.path`."""
    return next(iter(metadata.distributions(name="triton", path=sys.path if path is None else path)), None)


def choose(folder: str) -> tuple[bool, str]:
    """Whether the Triton in `folder` is to be put in front, and the line that says so."""
    installed, brought = triton_of(), triton_of([folder])
    here = f"Triton {installed.version}, installed" if installed else "no Triton is installed"
    if installed and Version(installed.version) >= FENCED_TRITON:
        return False, here
    if brought is None:
        return False, f"{here}: kernels for Hopper and later are refused; sh benchmarks/gpu_pack.sh pack triton"
    made_for = f"cp{sys.version_info.major}{sys.version_info.minor}-"
    if made_for not in (brought.read_text("WHEEL") or ""):
        return False, f"{here}; the pack's {brought.version} is for another Python: FOR=... gpu_pack.sh pack triton"
    return True, f"Triton {brought.version}, brought by a pack; {here}"


if __name__ == "__main__":
    in_front, said = choose(sys.argv[1])
    print(said, file=sys.stderr)
    if in_front:
        print(sys.argv[1])
