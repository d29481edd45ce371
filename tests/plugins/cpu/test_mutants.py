"""The proofs of `exact` fail when a kernel sums in an order that depends on what else is computed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch

from d2sd.plugins.cpu import compiler, library
from tests.modeling.test_families import test_prompt_in_chunks_then_decoding as family
from tests.modeling.test_flex import test_a_block_behind_a_node_is_the_one_drafted_after_it as joining
from tests.modeling.test_native import test_bits_of_a_row_are_its_own as layers
from tests.modeling.test_native import test_keys_and_values_of_a_context as context
from tests.modeling.test_native import test_windows_and_sinks as windows
from tests.plugins.choice.test_compiled import test_rows_are_the_specifications_whatever_is_beside_them as likeliest
from tests.plugins.choice.test_compiled import test_the_largest_come_first_and_of_equals_the_first as ties
from tests.plugins.cpu.test_linear import TYPES
from tests.plugins.cpu.test_linear import test_bits_of_a_row_do_not_depend_on_other_rows as linear
from tests.plugins.delta_rule.test_delta_rule import test_exact_outputs_are_plain_decoding_bit_for_bit as delta_rule
from tests.plugins.pair_scores.test_compiled import test_drafts_are_the_specifications as pairs

pytestmark = [pytest.mark.skipif(not library.available(), reason=f"no CPU kernels: {library.load()}"), pytest.mark.slow]

#: File, what is replaced, by what, and which test must notice: of linear layers, of whole layers, of windows and sinks,
#: of the delta rule, of a draft's candidates and pairs, of contexts, or of which family.
MUTANTS = {
    "tiles of many rows round products first": (
        "linear.h",
        "sums[m][i] = fma_native(value, w[i], sums[m][i]);",
        "sums[m][i] = rows > 2 ? (native)(value * w[i] + sums[m][i]) : fma_native(value, w[i], sums[m][i]);",
        "linear",
    ),
    "a second thread starts at another sum": (
        "linear.h",
        "finish(to, sum, gate, row, count, panel * PANEL);",
        "if (share->thread) sum[0] += 1e-6f; finish(to, sum, gate, row, count, panel * PANEL);",
        "linear",
    ),
    "new rows from the last to the first": (
        "attention.h",
        "(keys)->seen[i_]",
        "(keys)->seen[(keys)->count - 1 - i_]",
        "layers",
    ),
    "weights summed apart in pages": (
        "attention.h",
        "sum += *weights;",
        "sum += *weights; if (k->count > 1 && j == 0) sum += splat(1e-6f);",
        "layers",
    ),
    "the context is not bounded": (
        "layers.c",
        "first = bound < context ? bound : context",
        "first = bound < context ? 0 : context",
        "windows",
    ),
    "rows of a prompt are not bounded": (
        "layers.c",
        "skipped = run->seen ? 0 : bound - first",
        "skipped = 0 * (bound - first)",
        "windows",
    ),
    "the sink takes no part": (
        "attention.h",
        "if (sinks) total[g] += exp16(splat(sinks[g] - most))[0];",
        "",
        "windows",
    ),
    "a branch is added as it is": (
        "layers.c",
        "run->pass->x[row * size + i] += normed[i]",
        "run->pass->x[row * size + i] += run->branch[row * size + i]",
        "Gemma 3",
    ),
    "one rotation for all layers": (
        "layers.c",
        "view = pass->view + body->layer[number].view;\n        float",
        "view = pass->view;\n        float",
        "Gemma 3",
    ),
    "the norm in front of experts is the last one": ("layers.c", "norm = layer->post_norm;", "", "Qwen3-30B-A3B"),
    "a fork goes on from the last row": ("delta.h", "p == before ? LAST : level[row]", "LAST", "delta rule"),
    "commits raise 2 to their gates": (
        "delta.h",
        "splat(expf(d->g[at]))",
        "splat(d->q ? expf(d->g[at]) : exp2f(1.44269504f * d->g[at]))",
        "delta rule",
    ),
    "of equals the last": ("drafts.h", "x[i] > logit[at - 1]", "x[i] >= logit[at - 1]", "likeliest"),
    "logits that nobody looks at": (
        "drafts.h",
        "(x + start + part * LANES) > least",
        "(x + start) > least",
        "likeliest",
    ),
    "parents in their own order": (
        "drafts.h",
        "(slot ? before : order)[from - 1]",
        "(slot ? before : order)[0]",
        "pairs",
    ),
    "a context at its first place": ("drafts.h", "c->cos + row * c->head_dim", "c->cos", "context"),
    "rows that join have the pass's heads": ("layers.c", "return part < pass->batch ?", "return 1 ?", "joining"),
    "rows that join see what the first row sees": ("layers.c", "(part < pass->batch ? 0 : pass->own)", "0", "joining"),
    "the sink of the first heads": ("layers.c", "layer->sinks + h * group + done", "layer->sinks + done", "windows"),
}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the kernels, from which the library is built and loaded in this test."""
    folder = tmp_path / "cpu"
    shutil.copytree(compiler._SOURCES, folder)
    monkeypatch.setattr(compiler, "_SOURCES", folder)
    monkeypatch.setattr(compiler, "_FLAGS", ("-O1", *compiler._FLAGS[1:]))  # half the time of -O3
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cached in (compiler.build, library.load):
        cached.cache_clear()
    yield folder
    for cached in (compiler.build, library.load):
        cached.cache_clear()


def noticed(proof: Callable[[], None]) -> bool:
    try:
        proof()
    except AssertionError:
        return True
    return False


@pytest.mark.sampled(4)  # each compiles the kernels
@pytest.mark.parametrize("name", [None, *MUTANTS], ids=str)
def test_mutants_are_noticed(name: str | None, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs: dict[str, list[Callable[[], None]]] = {
        "linear": [partial(linear, depth, dtype, monkeypatch) for dtype in TYPES for depth in (200, 192)],
        "layers": [partial(layers, dtype, size) for dtype in TYPES for size in (16, 64)],
        "delta rule": [partial(delta_rule, torch.float32)],
        "likeliest": [partial(likeliest, 1000), ties],
        "pairs": [partial(pairs, torch.float32, "slot", 1)],
        "context": [partial(context, "qwen3", torch.float32, monkeypatch)],
        "joining": [partial(joining, "compiled", None, monkeypatch)],
        "windows": [partial(windows, (4, 9, 4), sinks=True)],
        **{case: [partial(family, case, 1)] for case in ("Gemma 3", "Qwen3-30B-A3B")},
    }
    test = None
    if name is not None:
        file, old, new, test = MUTANTS[name]
        text = (sources / file).read_text()
        assert old in text
        (sources / file).write_text(text.replace(old, new))
    assert Path(library.functions()._name).is_relative_to(sources.parent), "built from these sources"
    if test is None:
        assert not any(noticed(proof) for proof in chain(*proofs.values()))
    else:
        assert any(noticed(proof) for proof in proofs[test])
