"""Write docs/support.md: what runs where, how that is known, by which command and since when.

    python -m docs.support            # writes the page
    python -m docs.support --check    # fails if it is out of date, or a proof that it names is gone

A row names its proofs: tests, by the lane that runs them, whose date is that of docs/results/checks.json; or a row of
the GPU ledger, whose dates are those of its answer.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from d2sd.bench.markdown import line_table
from d2sd.build.refused import REFUSED, UNFUSED

DOCS = Path(__file__).parent
PAGE, LEDGER = DOCS / "support.md", DOCS / "gpu.md"
STAMPS = DOCS / "results" / "checks.json"


@dataclass(frozen=True, slots=True)
class Row:
    """A combination that is served."""

    target: str
    drafters: str
    policies: str
    precision: str
    shown: str  # what the proofs show
    lane: str = ""  # that runs the tests
    tests: tuple[str, ...] = ()  # files or folders below tests
    ledger: tuple[int, ...] = ()  # rows of docs/gpu.md


_QUANTIZED = ("runtime/backends/test_quantized.py", "convert/checkpoint/test_quantized_targets.py")
_CLIENTS = ("d2sd/serve/openai/clients",)
EVERY, DENSE = "every family", "Llama, Qwen2, Qwen3"
PAIR, HEADS = "DFlash, D²SD's second", "DSpark, DFlash 2, DSpine, pair heads"
LOSSLESS, TYPES = "tokens of plain decoding", "fp32, bf16, fp16"
ONE, ALONE = "`chain`, `ddtree`, `flex_parallel`", "`chain`, `ddtree`, `reanchor`, `hybrid`"
SECTIONS: Mapping[str, tuple[Row, ...]] = {
    "CPU": (
        Row(EVERY, "none", "`off`", "fp32", "transformers' logits", "test", ("modeling/test_families.py",)),
        Row(EVERY, PAIR, "all", "fp32", LOSSLESS, "test", ("runtime/test_differential.py",)),
        Row(EVERY, PAIR, "all", TYPES, f"random engines: {LOSSLESS}", "differential", ("runtime/differential.py",)),
        Row(
            DENSE, "FlexDraft", ONE, TYPES, f"random engines: {LOSSLESS}", "differential", ("runtime/differential.py",)
        ),
        Row(
            EVERY, "EAGLE-3", ALONE, TYPES, f"random engines: {LOSSLESS}", "differential", ("runtime/differential.py",)
        ),
        Row("SmolLM2", PAIR, "all", "fp32, bf16", f"real weights: {LOSSLESS}", "test-slow", ("test_smollm2.py",)),
        Row("Qwen3", HEADS, "all", "fp32", LOSSLESS, "test", ("runtime/test_differential.py",)),
        Row("Llama", "JetSpec, windows, sinks", "all", "fp32", LOSSLESS, "test", ("runtime/test_differential.py",)),
        Row("published FP8, INT4, INT8, NVFP4", PAIR, "`hybrid`", "fp32", LOSSLESS, "test-slow", _QUANTIZED),
        Row(
            "Llama",
            PAIR,
            "all",
            "FP8 pages",
            "pages in the model's type",
            "test",
            ("runtime/backends/test_fp8_pages.py",),
        ),
        Row("gpt-oss, Llama", PAIR, "all", "2 and 4 processes", LOSSLESS, "test", ("runtime/test_tensor_parallel.py",)),
        Row("Arm, by emulation", "all", "all", "fp32, bf16", "the library's results and bits", "arm", ("arm",)),
    ),
    "CUDA": (
        Row("SmolLM2", PAIR, "six", "fp32", "captured steps: tokens of the CPU", ledger=(5,)),
        Row("SmolLM2", PAIR, "seven", "bf16, `exact`", LOSSLESS, ledger=(30,)),
        Row("SmolLM2", "FlexDraft", "`chain`, `ddtree`", "bf16, `exact`", LOSSLESS, ledger=(29,)),
        Row(f"{DENSE}, hybrids", PAIR, "all", "fp32", "fused layers: PyTorch's", ledger=(27, 45)),
        Row("sizes of Qwen3-8B", PAIR, "`off`, `hybrid`", "bf16, FP8", "times of captured steps", ledger=(5, 13)),
        Row("sizes of Qwen3-32B", PAIR, "all", "bf16, FP8", "times of two drafters, one and none", ledger=(46,)),
        Row("experts, windows, sinks", PAIR, "all", "bf16", "tokens, times", ledger=(40,)),
        Row("Qwen3", HEADS, "all", "bf16", "tokens, times", ledger=(42,)),
        Row("published FP8, NVFP4", PAIR, "all", "FP8, NVFP4", "products, times", ledger=(41,)),
        Row("several GPUs", PAIR, "all", "bf16", "tokens, times", ledger=(39,)),
        Row("every kernel", "–", "–", "of four architectures", "PTX executed: its specification", "ptx", ("ptx",)),
        Row("every kernel", "–", "–", "of four architectures", "registers, memory, loads in flight", "kernels"),
    ),
    "TensorRT": (
        Row(
            DENSE,
            f"{PAIR}, FlexDraft",
            "all",
            "fp32, FP8",
            "graphs in ONNX Runtime: the models",
            "test",
            ("convert/onnx",),
        ),
        Row("SmolLM2", PAIR, "all", "fp16", "engines for three architectures", "engines", ("test_smollm2_engines.py",)),
        Row("SmolLM2", PAIR, "all", "fp16", "plugins inside engines, times", ledger=(19, 21)),
    ),
    "Servers": (
        Row("SmolLM2", PAIR, "all", "OpenAI's API", "six client libraries", "client-test", _CLIENTS),
        Row("SmolLM2", PAIR, "all", "Triton", "a real server on a CPU", "triton-test", ("d2sd/serve/triton",)),
        Row("SmolLM2", PAIR, "all", "Dynamo", "a real frontend on a CPU", "dynamo-test", ("d2sd/serve/dynamo",)),
        Row(
            "SmolLM2", PAIR, "trees", "TensorRT-LLM", "a stand-in for its path", "trtllm", ("d2sd/integrations/trtllm",)
        ),
        Row("SmolLM2", PAIR, "all", "all of these, on a GPU", "tokens, times", ledger=(10, 23, 32)),
    ),
}
HEAD = """# What is supported, and how that is known

<!-- Written by docs/support.py. Do not edit. -->

Each row names what shows it: tests and the lane that runs them ([all lanes](results/checks.md)), or rows of the
[GPU ledger](gpu.md), which has the command of each. Families are those of [models](models.md), kinds those of
[formats](formats.md#kinds-of-drafters), policies those of the [recipe](reference/recipe.md).
"""


def page() -> str:
    """The page. Raises ValueError for a row with a proof that is gone."""
    text = HEAD
    for title, rows in SECTIONS.items():
        text += f"\n## {title}\n\n"
        heads = ("target", "drafters", "policies", "precision" if title != "Servers" else "server", "shown", "by", "on")
        text += line_table(heads, [_cells(row) for row in rows]) + "\n"
    return text + "\n## Known limits\n\n" + "".join(f"- {line}\n" for line in _limits())


def _cells(row: Row) -> tuple[str, ...]:
    """The cells of a row's line."""
    how, when = _ledger(row) if row.ledger else _lane(row)
    return row.target, row.drafters, row.policies, row.precision, row.shown, how, when


def _lane(row: Row) -> tuple[str, str]:
    """The command of a row's tests, and the date on which their lane ran."""
    stamp = json.loads(STAMPS.read_text("utf-8"))[row.lane]
    for test in row.tests:
        if not (DOCS.parent / "tests" / test).exists():
            raise ValueError(f"{row.target}, {row.precision}: tests/{test} is gone")
    when = f"{stamp['date']}, red" if stamp["failed"] else stamp["date"]
    return f"`make {row.lane}`" + "".join(f", `tests/{test}`" for test in row.tests), when


def _ledger(row: Row) -> tuple[str, str]:
    """The ledger's rows, and the cards and dates of their answers."""
    found, lines = list[str](), LEDGER.read_text("utf-8").splitlines()
    for number in row.ledger:
        line = next((line for line in lines if line.startswith(f"| {number} |")), None)
        if line is None:
            raise ValueError(f"{row.target}, {row.precision}: the ledger has no row {number}")
        found += re.findall(r"\[(H\d+, [\d-]+)\]", line)
    rows = ", ".join(map(str, row.ledger))
    return f"[ledger](gpu.md), {rows}", "; ".join(sorted(set(found))) or "no GPU so far"


def _limits() -> Iterator[str]:
    """List what is refused, by what a target has, and what holds for all."""
    for feature, reasons in REFUSED.items():
        yield f"**{feature[0].upper()}{feature[1:]}**: " + " ".join(reasons.values())
    yield "**GeGLU, norms of branches, scaled queries, a second RoPE** (Gemma 3, 4): " + " ".join(UNFUSED.values())
    yield "**Heads of two sizes** (Gemma 4): one GPU, no training, no TensorRT-LLM; heads of 512 on CUDA not run yet."
    yield "**FlexDraft**: targets of Llama's and Qwen's dense layers; one head, in place of the first drafter."
    yield "**EAGLE-3**: no second drafter, no graphs or engines; on CUDA not run yet."
    yield "**Images, audio, MTP layers** of a checkpoint are left out; `--plan` says so."
    yield "**Adapters by request** (LoRA) are not planned: one is [merged at build](bring-your-model.md)."
    yield "**Several machines** share no model: workers are run by [Triton](triton.md) or [Dynamo](dynamo.md)."
    yield (
        "**Half precision on CUDA without `exact`**: a text may differ from plain decoding's where two tokens are "
        "nearly equal ([accuracy](accuracy.md))."
    )


def main() -> None:
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), "utf-8")
    elif PAGE.read_text("utf-8") != page():
        sys.exit("docs/support.md is out of date: run python -m docs.support")


if __name__ == "__main__":
    main()
