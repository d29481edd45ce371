"""The proofs of `exact` fail when a kernel sums in an order that depends on what else is computed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from d2sd.plugins.cpu import compiler, library

pytestmark = [
    pytest.mark.skipif(not library.available(), reason=f"no CPU kernels: {library.load()}"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

LINEAR, LAYERS = "tests/plugins/cpu/test_linear.py::test_bits", "tests/modeling/test_native.py::test_bits_of_a_row"
#: File, what is replaced, by what, and the test that must notice.
MUTANTS = {
    "tiles of many rows round products first": (
        "linear.h", "sums[m][0] = fma16(value, w0, sums[m][0]);",
        "sums[m][0] = rows > 4 ? (f32x16)(value * w0 + sums[m][0]) : fma16(value, w0, sums[m][0]);", LINEAR,
    ),
    "a second thread starts at another sum": (
        "linear.h", "finish(to, sum, gate, row, count, panel * PANEL);",
        "if (share->thread) sum[0] += 1e-6f; finish(to, sum, gate, row, count, panel * PANEL);", LINEAR,
    ),
    "new rows from the last to the first": (
        "attention.h", "(keys)->seen[i_]", "(keys)->seen[(keys)->count - 1 - i_]", LAYERS,
    ),
    "weights summed apart in pages": (
        "attention.h", "sum += *weights;", "sum += *weights; if (k->count > 1 && j == 0) sum += splat(1e-6f);", LAYERS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [None, *MUTANTS], ids=str)
def test_mutants_are_noticed(name: str | None, tmp_path: Path) -> None:
    sources = tmp_path / "cpu"
    shutil.copytree(compiler._SOURCES, sources)
    test = LINEAR
    if name is not None:
        file, old, new, test = MUTANTS[name]
        text = (sources / file).read_text()
        assert old in text
        (sources / file).write_text(text.replace(old, new))
    file, _, test = test.partition("::")
    code = (
        "import sys, pathlib, pytest\n"
        "from d2sd.plugins.cpu import compiler\n"
        f"compiler._SOURCES = pathlib.Path({str(sources)!r})\n"
        f"sys.exit(pytest.main([{file!r}, '-k', {test!r}, '-x', '-q', '-p', 'no:cacheprovider']))"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if name is None else 1), done.stdout[-2000:] + done.stderr[-2000:]
