"""Fused layers of hybrids: with the ops' specifications they are the layers bit by bit, and few kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.fp8 import Fp8Linear, linear_names
from d2sd.modeling.fused import FusedLayers, fuse
from tests.modeling.hybrids import CONFIGS, pair
from tests.modeling.test_hybrids import Requests
from tests.tiny import in_fp8, random_tokens

pytestmark = pytest.mark.usefixtures("anywhere")

AUX = (0, 4)
#: Parents of a tree's nodes.
TREE = [-1, 0, 0, 2, 1, 3, 3, 5]


def fused(model: Decoder) -> Decoder:
    made = copy.deepcopy(model)
    fuse(made)
    assert isinstance(made.compiled, FusedLayers)
    return made


@torch.inference_mode()
def outputs(model: Decoder) -> dict[str, Tensor]:
    """A prompt in two chunks, a tree behind it, what is committed of that, and one row more."""
    torch.manual_seed(0)
    tokens, requests = random_tokens(model, 2, 24), Requests(model, 2, 24)
    found = {"prompt": requests.prompt(tokens[:, :9]), "chunk": requests.prompt(tokens[:, 9:10])}
    out = requests.tree(tokens[:, 10:18], TREE)
    requests.commit(out, torch.tensor([[0, 2, 3, 5], [0, 1, 4, 0]]), torch.tensor([4, 3]))
    found |= {"tree": out.hidden, "k": out.k, "v": out.v, "next": requests.decode(tokens[:, 18])}
    parts = [states[:, 1:3] for states in requests.states.tensors]
    found |= zip(("recurrent", "convolution")[-len(parts) :], parts, strict=True)
    found["features"] = model.full_pass(tokens, AUX).features
    return {name: x.nan_to_num() for name, x in found.items()}


def assert_same_outputs(model: Decoder, within: float) -> None:
    expected, found = outputs(model), outputs(fused(model))
    for name, tensor in expected.items():
        bound = max(within, 1e-5) if name == "recurrent" else within  # in fp32, whatever the model's type
        torch.testing.assert_close(found[name], tensor, atol=bound, rtol=bound)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CONFIGS)
def test_fused_layers_are_the_layers(case: str, dtype: torch.dtype) -> None:
    """In fp32 a product of another shape may sum in another order."""
    assert_same_outputs(pair(case).copy(dtype, packed=False), 1e-4 if dtype == torch.float32 else 0)


def assert_near(model: Decoder) -> None:
    """In FP8 a sum in another order may round to the number beside, a 16th away."""
    expected, found = outputs(model), outputs(fused(model))
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 0.02 * tensor.norm(), name


def linears(model: Decoder, keep: Callable[[str], bool]) -> list[str]:
    return [name for name in linear_names(model) if keep(name)]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("shared", [False, True])
def test_fp8_layers_and_pages(case: str, shared: bool) -> None:
    """`shared`: weights of one input have one scale."""
    model = pair(case).copy(packed=False)
    model = in_fp8(model, linears(model, lambda name: "shared_expert_gate" not in name), cache=True)
    for name, linear in model.named_modules() if shared else ():
        if isinstance(linear, Fp8Linear) and "in_proj" in name:
            linear.weight_scale = torch.tensor(3e-4)
    assert_near(model)
    joint = fused(model).compiled.products[0]  # type: ignore[union-attr]
    assert (joint.scales is None) == (shared or case.startswith("LFM2")), "LFM2 has one layer of that input"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", [case for case in CONFIGS if not case.startswith("LFM2")])
def test_gates_of_another_type_are_a_product_of_their_own(case: str) -> None:
    """Public FP8 checkpoints leave b and a in 16 bits."""
    model = pair(case).copy(packed=False)
    small = ("in_proj_a", "in_proj_b", "in_proj_ba", "shared_expert_gate")
    model = in_fp8(model, linears(model, lambda name: not name.endswith(small)))
    assert_near(model)
    counts = len(fused(model).compiled.products), len(fused(pair(case).copy(packed=False)).compiled.products)  # type: ignore[union-attr]
    assert counts[0] == counts[1] + 3


@pytest.mark.parametrize("case", CONFIGS)
def test_weights_are_held_once(case: str) -> None:
    model = pair(case).copy(packed=False)
    layers = model.layers
    fuse(model)
    held = {product.weight.untyped_storage().data_ptr() for product in model.compiled.products}  # type: ignore[union-attr]
    named = [(name, x) for name, x in layers.named_parameters() if "expert" not in name]
    weights = [x for name, x in named if name.endswith("proj.weight") or "in_proj_" in name]
    assert len(weights) >= 3 * 3 + 2 * 4
    assert {x.untyped_storage().data_ptr() for x in weights} <= held
