"""Write docs/roofline.md: decode steps of Qwen3-8B's geometry by arithmetic, from counted launches and data sheets.

    python -m docs.roofline            # writes the page, in half a minute
    python -m docs.roofline --check    # fails if it is out of date

The rows are those of `benchmarks.gpu.steps.BATCHES`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from benchmarks.gpu.hybrid_steps import POLICIES, HybridStep, count_hybrid
from benchmarks.gpu.kernel_seconds import counted_seconds
from benchmarks.gpu.roofline import NODE_SECONDS as NODE
from benchmarks.gpu.roofline import PEAKS, floor_bytes, floor_seconds, passes, seconds
from benchmarks.gpu.steps import BLOCK_SIZE, BRANCHES, CONTEXT, FILTERED, ROWS, SAMPLED, Step, count, rows
from benchmarks.gpu.traffic import ACTIVATIONS, KV, LOGITS, STATES, WEIGHTS, Launch, read, written
from d2sd.bench.markdown import line_table

PAGE = Path(__file__).with_name("roofline.md")
DRAFT_VOCABULARY = 32768
#: The steps that the bounds are about.
PLAIN, PAIR, PLAIN8 = Step("off"), Step("d2sd"), Step("off", "fp8")
PAIR8 = Step("d2sd", "fp8", drafted=DRAFT_VOCABULARY)

TOP = f"""# Roofline of a decode step

<!-- Written by docs/roofline.py. Do not edit. -->

**All of this is arithmetic: nothing on this page was measured.** What GPUs have shown is in the [ledger](gpu.md);
`benchmarks/gpu_suite.sh` times the same rows where there is one.

Qwen3-8B's geometry (36 layers, width 4,096), two drafters of 5 layers that read 5 of its layers, a FlexDraft head over
the last 10; block size {BLOCK_SIZE}, {BRANCHES} branches, {ROWS} nodes, {CONTEXT:,} tokens of context in bf16 pages,
greedy. FP8 is what `d2sd build` makes: every linear layer but the target's head and FlexDraft's calibration network.
Draft vocabulary: all 151,936 tokens, or {DRAFT_VOCABULARY:,}.

## How it is counted

The step's own code runs on tensors of PyTorch's `meta` device, which have shapes and no memory
(`benchmarks/gpu/traffic.py`). A **node** of the step's CUDA graph is a Triton kernel or an operator other than a view;
without a graph it is a launch. A step is one copy in and one copy out besides. Bytes are those of its arguments and
results: each byte once a node, of K/V pages those of the context, of a table the rows that are picked. Operations are
those of matrix products.

The **floor** of a pass is the longer of reading its weights and its context's K/V once, and of its products. It leaves
out activations, logits, writes and launches. **Counted** takes for each node the longer of all its bytes and its
products, at the same peaks. **With nodes** a node also takes at least {1e6 * NODE:g} µs, an assumption for small
kernels behind each other. **With kernels** attention, growth of trees, drafts' candidates and filters also take what
their instructions and latencies come to on an H100 ([how](kernel-times.md)), on the other GPUs the same.

"""

SHEET = ["GPU", "TB/s", "TFLOP/s in bf16", "in FP8", "NVIDIA's data sheet"]
SHEETS = {"H100": "H100 Tensor Core GPU, SXM", "H200": "H200 Tensor Core GPU, SXM", "B200": "HGX B200, per GPU"}

NOT_COUNTED = """
## What the arithmetic leaves out

- **The L2 cache between nodes.** A node's activations are charged to memory even if the node before has just written
  them. At batch 1 most are a few MB and stay in L2 (50 MB on H100 and H200), so true bytes are nearer to the floor.
- **Reads within a node.** Row tiles of one K/V head read the same bytes again, from L2 as far as they fit.
- **Efficiency.** Peaks are data sheets'; products of few rows reach less. [Capacity](capacity.md) has nothing but
  steps that were measured.
- **The host**, which a graph and the step behind it hide, and prefill.
- **Operators of PyTorch that are several kernels.** Each counts as one node.
"""


@cache
def counted(one: Step) -> list[Launch]:
    return count(one)


def page() -> str:
    sheets = [
        [gpu, f"{one.bandwidth / 1e12:g}", f"{one.half / 1e12:,.0f}", f"{one.fp8 / 1e12:,.0f}", SHEETS[gpu]]
        for gpu, one in PEAKS.items()
    ]
    parts = [TOP, line_table(SHEET, sheets), "\n\nDense rates, as in `benchmarks/gpu/roofline.py`.\n", bounds()]
    found = rows()
    parts += ["\n\n## Bytes, operations, nodes\n\n", line_table(COUNTS, map(counts, found))]
    parts += [
        "\n\n## Milliseconds\n\nFloor, counted, with nodes and with kernels; the last in plain steps of the same type"
        " and batch.\n\n"
    ]
    heads = ["step", "batch", *(f"{gpu}: floor, counted, with nodes, with kernels, in plain steps" for gpu in PEAKS)]
    parts += [line_table(heads, map(times, found)), "\n", HYBRID]
    parts += [line_table(HYBRID_COUNTS, map(hybrid_counts, hybrid_rows())), "\n", NOT_COUNTED]
    return "".join(parts)


HYBRID = """
## A hybrid

Qwen3.5-4B's geometry, 24 gated delta nets and 8 layers that attend, with a drafter of 6 layers, which drafts twice in
`reanchor`. A state is read once a pass for all nodes of a tree, and once more, and written, by the commit; the floor
has it once. The head is the embedding.

"""
HYBRID_COUNTS = [
    "step",
    "batch",
    "weights, GB",
    "K/V",
    "states",
    "verification: read, of its floor",
    "read and written",
    "step: read, of the floor",
    "nodes",
]


def hybrid_rows() -> list[HybridStep]:
    return [HybridStep(name, kind, batch) for kind in ("bf16", "fp8") for name in POLICIES for batch in (1, 8)]


def hybrid_counts(one: HybridStep) -> list[str]:
    """A line of the table of hybrids."""
    launches = count_hybrid(one)
    verify = [launch for launch in launches if launch.stage == "verify"]
    floor = floor_bytes(verify)
    roles = [f"{(read(launches, role) + written(launches, role)) / 1e9:.2f}" for role in (WEIGHTS, KV, STATES)]
    shares = read(verify) / floor, (read(verify) + written(verify)) / floor, read(launches) / floor_bytes(launches)
    name = f"{'FP8' if one.kind == 'fp8' else one.kind} `{one.policy}`"
    return [name, str(one.batch), *roles, *(f"{share:.3f}" for share in shares), str(len(launches))]


COUNTS = [
    "step",
    "batch",
    "weights, GB",
    "K/V",
    "logits",
    "other",
    "read, of the floor",
    "read and written",
    "TFLOP",
    "nodes",
]


def counts(one: Step) -> list[str]:
    """A line of the first table."""
    launches, floor = counted(one), floor_bytes(counted(one))
    roles = [
        f"{(read(launches, role) + written(launches, role)) / 1e9:.2f}" for role in (WEIGHTS, KV, LOGITS, ACTIVATIONS)
    ]
    reads, both = read(launches) / floor, (read(launches) + written(launches)) / floor
    flops = sum(launch.flops for launch in launches)
    return [
        named(one),
        str(one.batch),
        *roles,
        f"{reads:.3f}",
        f"{both:.3f}",
        f"{flops / 1e12:.2f}",
        str(len(launches)),
    ]


def times(one: Step) -> list[str]:
    """A line of the second table."""
    cells, plain = [], Step("off", one.kind, one.batch)
    for gpu in PEAKS:
        floor, by_bytes = floor_seconds(counted(one), PEAKS[gpu]), seconds(counted(one), PEAKS[gpu])
        found = floor, by_bytes, with_nodes(one, gpu), with_kernels(one, gpu)
        cells.append(", ".join(f"{1e3 * t:.2f}" for t in found) + f", {found[3] / with_kernels(plain, gpu):.2f}")
    return [named(one), str(one.batch), *cells]


def with_nodes(one: Step, gpu: str) -> float:
    return seconds(counted(one), PEAKS[gpu], least=NODE)


def with_kernels(one: Step, gpu: str) -> float:
    rows_of_target = 1 if one.policy == "off" else ROWS
    return seconds(
        counted(one), PEAKS[gpu], least=NODE, counted=lambda launch: counted_seconds(launch, one.batch, rows_of_target)
    )


def named(one: Step) -> str:
    drafted = f", {one.drafted // 1024}k drafted" if one.drafted else ""
    return f"{'FP8' if one.kind == 'fp8' else one.kind} `{one.policy}`{drafted}"


def bounds() -> str:
    """The bounds of a step at batch 1, each with its figures."""
    return "\n## Bounds at batch 1\n\n" + line_table(["bound", "figure", "holds"], _bounds())


def _bounds() -> Iterator[list[str]]:
    def line(what: str, figures: Sequence[str], holds: Iterable[bool]) -> list[str]:
        found = list(holds)
        return [what, "; ".join(figures), "yes" if all(found) else "in part" if any(found) else "**no**"]

    pairs = {"bf16": PAIR, "FP8, 32k drafted": PAIR8}
    weights = {
        name: read(counted(one), WEIGHTS) / sum(part.weights for part in passes(counted(one)).values())
        for name, one in pairs.items()
    }
    yield line(
        "`d2sd` reads every weight once a pass",
        [f"{name}: {ratio:.3f} times" for name, ratio in weights.items()],
        [ratio < 1.0005 for ratio in weights.values()],
    )
    reads = {name: read(counted(one)) / floor_bytes(counted(one)) for name, one in pairs.items()}
    yield line(
        "`d2sd` reads at most 1.05 of the floor's bytes",
        [f"{name}: {ratio:.3f}" for name, ratio in reads.items()],
        [ratio <= 1.05 for ratio in reads.values()],
    )
    logits = (read(counted(PAIR), LOGITS) + written(counted(PAIR), LOGITS)) / 1e9
    yield line("logits of `d2sd` at most 0.15 GB", [f"{logits:.3f} GB"], [logits <= 0.15])
    base = read(counted(PAIR)) + written(counted(PAIR))
    more = {}
    for name, params in (("T = 1", SAMPLED), ("top-p and top-k", FILTERED)):
        launches = counted(Step("d2sd", params=params))
        more[name] = (read(launches) + written(launches)) / base - 1
    yield line(
        "T > 0 adds at most 5 % of the bytes",
        [f"{name}: {share:.2%}" for name, share in more.items()],
        [share <= 0.05 for share in more.values()],
    )
    nodes = {"bf16": (len(counted(PAIR)), 440), "FP8, 32k drafted": (len(counted(PAIR8)), 440)}
    yield line(
        "`d2sd` has at most 440 nodes",
        [f"{name}: {found}" for name, (found, _) in nodes.items()],
        [found <= most for found, most in nodes.values()],
    )
    for what, of in (("floors", floor_seconds), ("counted", seconds)):
        ratios = [of(counted(PAIR8), peaks) / of(counted(PLAIN8), peaks) for peaks in PEAKS.values()]
        yield line(
            f"`d2sd` in FP8, 32k drafted: at most 1.35 plain FP8 steps, {what}",
            _by_gpu(ratios),
            [r <= 1.35 for r in ratios],
        )
    ratios = [with_nodes(PAIR8, gpu) / with_nodes(PLAIN8, gpu) for gpu in PEAKS]
    yield line("the same with nodes", _by_gpu(ratios), [r <= 1.35 for r in ratios])
    ratios = [with_kernels(PAIR8, gpu) / with_kernels(PLAIN8, gpu) for gpu in PEAKS]
    yield line("the same with kernels", _by_gpu(ratios), [r <= 1.35 for r in ratios])
    for name, one in pairs.items():
        for what, least, extra in (("at least 2 µs a node", NODE, 0.0), ("2 µs more a node", 0.0, NODE)):
            ratios = [
                seconds(counted(one), peaks, least=least, more=extra) / floor_seconds(counted(one), peaks)
                for peaks in PEAKS.values()
            ]
            yield line(
                f"`d2sd`, {name}: at most 1.15 of its floor, {what}", _by_gpu(ratios), [r <= 1.15 for r in ratios]
            )


def _by_gpu(ratios: Sequence[float]) -> list[str]:
    return [f"{gpu} {ratio:.2f}" for gpu, ratio in zip(PEAKS, ratios, strict=True)]


def main() -> None:
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text, "utf-8")
    elif PAGE.read_text("utf-8") != text:
        sys.exit("out of date: docs/roofline.md; run python -m docs.roofline")


if __name__ == "__main__":
    main()
