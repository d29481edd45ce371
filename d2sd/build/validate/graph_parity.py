"""Checks exported graphs: ONNX Runtime serves them, and every output is compared with the PyTorch model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d2sd.errors import BuildError

if TYPE_CHECKING:
    from d2sd.build.validate.shadow import ShadowDecoder, ShadowDrafter
    from d2sd.bundle.load import Bundle
    from d2sd.policies import DrafterRole
    from d2sd.runtime.request import Request

#: Largest difference that counts as rounding, as a share of an output's largest number.
_BOUND = {"fp32": 1e-4, "fp16": 2e-2}


def check_graphs(bundle: Bundle, requests: list[Request], plain: list[list[int]]) -> dict[str, Any]:
    """Greedy answers of the graphs against `plain`, those of plain decoding, and the largest error of every output.

    Raises `BuildError` if an error is beyond rounding; not with FP8, where one input that rounds the other way changes
    all later values. ONNX Runtime does not support bf16 on a CPU: the result then says so.
    """
    from d2sd.build.validate.exercise import trees_of
    from d2sd.build.validate.shadow import ShadowDecoder, ShadowDrafter
    from d2sd.bundle.backends import aux_layer_ids
    from d2sd.runtime.backends.exported import OnnxSession, graph_drafter
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.model_runner import ModelRunner
    from d2sd.runtime.request import Limits
    from d2sd.runtime.speculation.policy import make_policy

    recipe, folder = bundle.recipe, bundle.path / "onnx"
    if recipe.precision == "bf16":
        return {"graphs": "not run: ONNX Runtime does not support bf16 on CPUs"}
    target = ShadowDecoder(bundle.target, aux_layer_ids(bundle), OnnxSession(folder / "target.onnx"))
    drafters: dict[DrafterRole, ShadowDrafter] = {}
    for role, plain_drafter in bundle.drafters.items():
        session = OnnxSession(folder / f"{role.folder}.onnx")
        graph = graph_drafter(plain_drafter, session, recipe.limits.page_size)
        drafters[role] = ShadowDrafter(plain_drafter, graph, role.folder)
    models: dict[str, ShadowDecoder | ShadowDrafter] = {
        "target": target, **{role.folder: drafter for role, drafter in drafters.items()}
    }  # fmt: skip
    tree, runner = recipe.tree, ModelRunner(target, drafters, block_size=recipe.tree.block_size)
    equal = {}
    for name in trees_of(drafters) or ["off"]:
        policy = make_policy(name, block_size=tree.block_size, branches=tree.branches, row_budget=tree.row_budget)
        answers = [sequence.answer for sequence in Engine(runner, policy, Limits.of(recipe.limits)).generate(requests)]
        equal[name] = sum(answer == expected for answer, expected in zip(answers, plain, strict=True))
    figures: dict[str, Any] = {"prompts": len(requests), "equal_to_plain_decoding": equal}
    for which, model in models.items():
        relative = model.errors.relative()
        figures[which] = {output: float(f"{error:.2g}") for output, error in relative.items()}
        if recipe.fp8 is None and max(relative.values()) > _BOUND[recipe.precision]:
            raise BuildError(
                f"The outputs of the graph of {which} differ from the model's.", where=folder / f"{which}.onnx",
                found=figures[which], expected=f"errors of at most {_BOUND[recipe.precision]} of an output's largest",
                fix="this is a bug in d2sd: report it",
            )  # fmt: skip
    return {"graphs": figures}
