"""Refuses, while a build is planned, what models of a kind are served without."""

from __future__ import annotations

from d2sd.errors import RecipeError
from d2sd.modeling.config import BodyConfig
from d2sd.modeling.mixers.configs import RECURRENT
from d2sd.recipe import Recipe

#: What is done without for a target with these, and why.
REFUSED = {
    "experts": {
        "engines": "Experts are not exported to TensorRT engines.",
        "fp8.target": "d2sd does not quantize experts to FP8.",
        "exact": "Products of experts are not batch-invariant on CUDA. On a CPU with a compiler they always are.",
    },
    **{
        kind.name: {
            "engines": f"{kind.name.capitalize()} are not exported to TensorRT engines.",
            "fp8.target": f"d2sd does not quantize {kind.name} to FP8.",
        }
        for kind in RECURRENT
    },
    "heads of two sizes": {
        "fp8.target": "d2sd does not quantize layers to FP8 whose values are made of the keys' product."
    },
}
#: What is done without for a target with `BodyConfig.beyond_fused`.
UNFUSED = {
    "engines": "Layers of this family are not exported to TensorRT engines.",
    "exact": "On CUDA the batch-invariant step is fused layers, which this family does not have.",
}


def refuse(recipe: Recipe, body: BodyConfig, found: str, *, target: bool) -> None:
    """Raise `RecipeError` for what a model of this kind cannot have."""
    fp8 = recipe.fp8 is not None and recipe.fp8.target
    asked = {"engines": recipe.engines is not None, "fp8.target": fp8 and target, "exact": recipe.exact and target}
    for feature in body.beyond_llama:
        unknown = UNFUSED if feature in body.beyond_fused else {}
        for key, reason in REFUSED.get(feature, unknown).items():
            if asked[key]:
                fix = f"set {key} to false" if key == "fp8.target" else f"remove {key} from the recipe"
                raise RecipeError(reason, where=f"recipe: {key}", found=found, fix=fix)
