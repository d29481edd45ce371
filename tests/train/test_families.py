"""Drafters are trained behind targets of every family: dense ones, that read the outputs of the target's layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from d2sd.convert.kinds import DFLASH
from d2sd.errors import D2SDError
from d2sd.modeling.config import Family
from d2sd.policies import DrafterRole
from d2sd.train.data.features import cache_features, online_features
from d2sd.train.data.responses import Response
from d2sd.train.dflash import first_drafter, second_drafter
from d2sd.train.loop import Trainer
from d2sd.train.pipeline.models import check_geometry
from d2sd.train_recipe import load_train_recipe
from tests.d2sd.cli.train.helpers import write_training
from tests.tiny import HYBRIDS, greedy_text, random_tokens, tiny_decoder
from tests.train.helpers import BLOCK, GEOMETRY, TAPS, exact_features, greedy_responses, settings, target


@pytest.mark.sampled(7)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma3_text", *HYBRIDS])
def test_a_first_and_a_second_drafter(family: Family, tmp_path: Path) -> None:
    model = tiny_decoder(family, tie=False)
    prompts = random_tokens(model, 3, 5, seed=3).tolist()
    responses = [Response(f"a{i}", ids, greedy_text(model, ids, 12)) for i, ids in enumerate(prompts)]
    data = online_features(model, TAPS, responses)
    cached = cache_features(model, TAPS, responses, tmp_path / "features", lambda _: None)
    torch.testing.assert_close(cached[1].features.float(), data[1].features, rtol=1e-2, atol=1e-2)
    made, again = (first_drafter(GEOMETRY, model, data, seed=4) for _ in range(2))
    assert made.config.body.beyond_llama == ()
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))
    losses: list[float] = []
    quick = settings(steps=12, learning_rate=1e-2, save_every=100)
    Trainer(model, made, data, quick).run(tmp_path / "first", lambda _, said: losses.append(said["loss"]))
    assert min(losses[6:]) < 0.8 * losses[0]
    DFLASH.write(tmp_path / "drafter", made.config, made.state_dict())
    read = DFLASH.load(tmp_path / "drafter", torch.float32)
    DFLASH.check(read.config, model.config, DrafterRole.FIRST, BLOCK, tmp_path)
    second = second_drafter(read, quick)
    Trainer(model, second, data, settings(steps=2), read).run(tmp_path / "second", lambda _, said: None)


def test_nothing_is_trained_behind_capped_logits(tmp_path: Path) -> None:
    """Said before any of it: objectives read logits as the head gives them."""
    write_training(tmp_path)
    recipe = load_train_recipe(tmp_path / "train.yaml")
    check_geometry(recipe, tiny_decoder().config)
    with pytest.raises(
        D2SDError, match=r"trained behind this target(.|\n)*found: gemma4_text(.|\n)*fix: name a published"
    ):
        check_geometry(recipe, tiny_decoder("gemma4_text").config)


def test_a_second_drafter_of_fewer_layers() -> None:
    geometry = GEOMETRY.model_copy(update={"layers": 2})
    first = first_drafter(geometry, target(), exact_features(greedy_responses()), seed=4)
    whole, short = (second_drafter(first, settings(layers=layers)) for layers in (None, 1))
    assert short.config.body.num_layers == 1
    assert 1 < len(whole.layers) == first.config.body.num_layers
    kept = whole.state_dict()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in short.state_dict().items())
