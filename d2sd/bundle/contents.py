"""Prints what a bundle contains, as its manifest says. PyTorch is not needed."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from d2sd.console import line, lines, show_settings, show_table
from d2sd.io import size_text
from d2sd.manifest import FIT_EXPLANATION, Manifest
from d2sd.model_warnings import model_warnings


def show_manifest(bundle: Path, manifest: Manifest) -> None:
    """Print what a verified bundle holds."""
    sizes = {name: (bundle / name).stat().st_size for name in manifest.files}
    line("bundle", bundle)
    line("files", f"{len(sizes)}, every hash verified")
    show_settings(manifest.recipe)
    table = Table("model", "parameters", "on disk")
    models = {"target": manifest.target} | {f"drafter_{name}": model for name, model in manifest.drafters.items()}
    for name, model in models.items():
        fields = model.model_dump(exclude={"parameters"}, exclude_none=True)
        line(name, ", ".join(f"{key} {value}" for key, value in fields.items()))
        for said in model_warnings(manifest.recipe, name, model.licence):
            line("warning", said)
        size = sum(count for file, count in sizes.items() if file.startswith(f"{name}/"))
        table.add_row(name, f"{model.parameters:,}", size_text(size))
    show_table(table)
    if built := manifest.engines:
        plugins = ", ".join(f"{count} in {model}" for model, count in built.plugins.items())
        line("engines", f"{', '.join(built.compute)} by {built.builder} {built.version}")
        line("", f"attention by plugins of ABI {built.plugin_abi}: {plugins}")
    for figures in manifest.figures() or ["none recorded"]:
        line("check", figures)
    if manifest.checks.get("fit"):
        lines(("" if index else "fit", line) for index, line in enumerate(FIT_EXPLANATION))
    line("built by", ", ".join(f"{tool} {version}" for tool, version in manifest.versions.items()))
