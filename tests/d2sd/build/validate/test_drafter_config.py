"""A drafter whose config has wrong layer ids or a wrong mask is refused at build; a correct one passes.

The drafter is trained to reproduce the target's answers to four prompts, and the build checks it on them.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner, Result

from d2sd.build.validate.drafter_config import (
    Predictions,
    _read_as,
    candidate_configs,
    check_drafter_config,
    evaluate_configs,
    sign_test,
)
from d2sd.bundle.load import load_bundle
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import make_engine
from d2sd.cli.build import build
from d2sd.cli.inspect import inspect
from d2sd.convert.kinds import DFLASH
from d2sd.errors import BuildError
from d2sd.io import MARKER, write_json
from d2sd.modeling.config import DrafterConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.policies import DrafterRole
from d2sd.prompts import read_prompts
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence
from d2sd.train.data.features import TrainingData
from d2sd.train.data.responses import Response
from d2sd.train.dflash import first_drafter
from d2sd.train.loop import Trainer
from d2sd.train_recipe import Geometry
from tests.commands import refused
from tests.convert.helpers import edit_json, edit_tensors, tree_bytes, write_project, write_target_dir
from tests.tiny import greedy_text, random_tokens, tiny_decoder, tiny_drafter
from tests.train.helpers import settings

FIRST = DrafterRole.FIRST
TAPS, MASK, BLOCK, TOKENS = (1, 2), 63, 4, 24
PROMPTS = 4
ROLES: dict[str, Any] = {"first": {}, "second": {"role": "variable_prefix", "prefix_weight_base": 0.9}}


@cache
def target() -> Decoder:
    return tiny_decoder(layers=4)


@cache
def answers() -> list[Response]:
    # from 31 on: the tokenizer reads w2, the end of text, in w24 too
    prompts = (31 + random_tokens(target(), PROMPTS, 5, seed=3) // 2).tolist()
    return [Response(f"a{i}", ids, greedy_text(target(), ids, TOKENS)) for i, ids in enumerate(prompts)]


def learnt(folder: Path, seed: int, *, causal: bool = False) -> Drafter:
    """A drafter that knows the answers; it reads the outputs of the two middle layers."""
    rows = []
    for answer in answers():
        out = target().full_pass(torch.tensor([answer.prompt_ids + answer.response_ids]), aux_layer_ids=TAPS)
        rows.append(torch.cat([out.features, out.hidden], -1)[0])
    data = TrainingData(answers(), len(TAPS), rows.__getitem__)
    geometry = Geometry(layers=1, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=list(TAPS))
    drafter = first_drafter(geometry, target(), data, seed)
    if causal:
        twin = Drafter(replace(drafter.config, body=replace(drafter.config.body, causal=(True,))))
        twin.load_state_dict(drafter.state_dict())
        drafter = twin
    long = settings(steps=120, learning_rate=1e-2, blocks=16, negatives=16, save_every=100)
    Trainer(target(), drafter, data, long).run(folder, lambda step, said: None)
    return drafter


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder. Its second drafter has learnt what a first one learns: the check asks the same of both."""
    folder = tmp_path_factory.mktemp("fit") / "project"
    changes = {"prompts": "prompts.jsonl", "tokens": TOKENS, "min_tau": 1.5}
    write_project(folder, checks=changes, limits={"max_batch": 8, "max_context": 64, "prefill_chunk": 8})
    shutil.rmtree(folder / "target")
    write_target_dir(folder / "target", target())
    for seed, (name, role) in enumerate(ROLES.items()):
        shutil.rmtree(folder / name)
        drafter = learnt(folder.with_name(f"training {name}"), seed)
        DFLASH.write(folder / name, replace(drafter.config, **role), drafter.state_dict())
    told = [{"id": a.id, "turns": [" ".join(f"w{token}" for token in a.prompt_ids)]} for a in answers()]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    return folder


@pytest.fixture
def project(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "project"))


def run(project: Path, *overrides: str) -> tuple[Result, Path]:
    out = project.with_name("out") / "tiny"
    asked = [argument for override in overrides for argument in ("--set", override)]
    return CliRunner().invoke(build, [str(project / "recipe.yaml"), "--out", str(out), *asked]), out


def said(built: Result) -> list[str]:
    """Lines on stderr but those of finished stages, which a build prints where there is no terminal."""
    return [line for line in built.stderr.splitlines() if " done after " not in line]


def checks(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "manifest.json").read_text())["checks"]
    return found


def test_a_drafter_that_fits_passes_with_the_same_figures_every_time(project: Path) -> None:
    built, out = run(project)
    assert built.exit_code == 0, built.output
    (line,) = said(built)
    assert line.startswith("not calibrated: ")
    found = checks(out)
    assert found["greedy"]["chain"]["tau"] > 2.5
    for name in ("first", "second"):
        fit = found["fit"][name]
        best, *_ = fit["tokens a step"].values()
        names = ["as declared", *OTHERS, "layer ids minus one", "layer ids plus one"]
        assert sorted(names) == [name for name in fit["tokens a step"] if "mask" not in name]
        assert best > 2.5
        clear = [tokens for name, tokens in fit["tokens a step"].items() if name not in ("as declared", *OTHERS)]
        assert max(clear) < best, "and so a build that took another for better would be wrong"
        assert 80 < fit["positions"] <= PROMPTS * TOKENS
    shown = CliRunner().invoke(inspect, [str(out)]).stdout
    for line in (f"greedy, chain: equal_to_plain_decoding {PROMPTS}, prompts {PROMPTS}, tau", "fit, first: positions"):
        assert f"check          {line} " in shown
    assert f"check          fit, second, tokens a step: as declared {best}, causal layers " in shown
    assert "check          fit, first, left out: mask 64 (the first id after the tokenizer): the vocabulary" in shown
    before = tree_bytes(out)
    shutil.rmtree(out)
    run(project)
    assert tree_bytes(out) == before


@pytest.mark.parametrize(
    ("name", "ids", "word"), [("first", [2, 3], "minus"), ("first", [0, 1], "plus"), ("second", [2, 3], "minus")]
)
def test_layer_ids_that_are_off_by_one_are_named_with_the_right_ones(
    project: Path, name: str, ids: list[int], word: str
) -> None:
    edit_json(project / name / "config.json", "dflash_config.target_layer_ids", ids)
    built, out = run(project)
    place = f"where: {project / name / 'config.json'}: dflash_config.target_layer_ids"
    refused(built, f"The {name} drafter does not fit: acceptance", place, f"found: {ids}", "expected: [1, 2]")
    assert re.search(rf"rises from [12]\.\d\d to 3\.\d\d tokens a step with layer ids {word} one\.", built.stderr)
    assert not out.exists()


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_wrong_mask_is_named_with_the_right_one(project: Path, name: str) -> None:
    edit_json(project / name / "config.json", "dflash_config.mask_token_id", 5)
    built, out = run(project)
    place = f"{project / name / 'config.json'}: dflash_config.mask_token_id\n  found: 5\n  expected: 63"
    right = "tokens a step with mask 63 (the last id of the vocabulary)."
    refused(built, f"The {name} drafter does not fit", right, place)
    assert not out.exists()


@pytest.mark.parametrize("by", ["checks.fit", "train", "bench"])
def test_a_drafter_that_may_be_undertrained_is_built(project: Path, by: str) -> None:
    """A training of few steps looks like a wrong config: the recipe may allow it, and what `d2sd train` wrote is right.

    Of a folder of another command nothing is known."""
    for name in ROLES:  # which must agree
        edit_json(project / name / "config.json", "dflash_config.target_layer_ids", [2, 3])
    if by != "checks.fit":
        claim_as(project, f"{by} tiny 0123456789abcdef")
    built, out = run(project, "checks.min_tau=null", *(["checks.fit=warn"] if by == "checks.fit" else []))
    assert "or it is undertrained: train it longer, or set checks.fit to warn" in built.stderr
    assert built.exit_code == (2 if by == "bench" else 0), built.output
    assert out.exists() is (by != "bench")
    assert ("warning: The first drafter does not fit: acceptance rises" in built.stderr) is (by != "bench")


def claim_as(folder: Path, run: str) -> None:
    write_json(folder / MARKER, {"d2sd": run})


@pytest.mark.slow
def test_a_causal_block_that_is_not_declared_is_named(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four answers are too few to be sure of what it changes."""
    monkeypatch.setattr("d2sd.build.validate.drafter_config._CHANCE", 0.05)
    drafter = learnt(tmp_path / "training", 0, causal=True)
    shutil.rmtree(project / "first")
    DFLASH.write(project / "first", drafter.config, drafter.state_dict())
    edit_json(project / "first" / "config.json", "is_causal", False)
    edit_json(project / "first" / "config.json", "dflash_config.is_causal", False)
    built, _ = run(project)
    place = f"{project / 'first' / 'config.json'}: is_causal\n  found: false\n  expected: true\n"
    refused(built, "tokens a step with causal layers.", place)


#: What is tried of every drafter but other layer ids and masks.
OTHERS = ("drafts from the anchor's row on", "causal layers", "eps 1e-06")


@pytest.mark.parametrize(
    ("keys", "key", "found", "right"),
    [
        ({"dflash_config.sample_from_anchor": True}, "dflash_config.sample_from_anchor", "true", "second row"),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 4, "use_sliding_window": True},
            "sliding_window",
            "4",
            "no window",
        ),
        ({"rms_norm_eps": 100.0}, "rms_norm_eps", "100", "eps 1e-06"),
        ({}, "dflash_config.mask_token_id", "a tensor mask_embedding", "mask 63 of the target's table"),
    ],
    ids=["slots", "window", "eps", "mask embedding"],
)
def test_what_a_config_says_wrongly_is_named(
    project: Path, keys: dict[str, Any], key: str, found: str, right: str
) -> None:
    """The first drafter is a plain one."""
    for name, value in keys.items():
        edit_json(project / "first" / "config.json", name, value)
    if not keys:
        edit_tensors(project / "first" / "model.safetensors", mask_embedding=torch.full((32,), 3.0))
    built, out = run(project)
    refused(built, f"{project / 'first' / 'config.json'}: {key}\n  found: {found}\n")
    assert right in said(built)[0]
    assert not out.exists()


def test_a_chain_below_min_tau_fails_the_build(project: Path) -> None:
    built, out = run(project, "checks.min_tau=3.99")
    refused(built, "where: recipe: checks.min_tau", "expected: at least 3.99")
    assert not out.exists()


def test_a_rarely_accepted_drafter_is_reported_and_built(tmp_path: Path) -> None:
    built, out = run(write_project(tmp_path / "project").parent)
    assert built.exit_code == 0, built.output
    *told, last = said(built)
    assert last.startswith("not calibrated: ")
    assert [line.split(":")[0] for line in told] == [
        f"the {name} drafter is almost never accepted" for name in ("first", "second")
    ]
    for line, name in zip(told, ("first", "second"), strict=True):
        assert f": {checks(out)['fit'][name]['tokens a step']['as declared']:.2f} tokens a step" in line


def test_where_there_is_nothing_to_fit_nothing_is_tried(tmp_path: Path) -> None:
    _, out = run(write_project(tmp_path / "project", drafters={}, tree={"policy": "off"}).parent)
    assert checks(out) == {"greedy": {}, "fit": {}}
    small: dict[str, Any] = {"limits": {"max_batch": 2, "max_context": 16}, "sampling": {"max_new_tokens": 4}}
    _, out = run(write_project(tmp_path / "small", **small, checks={"count": 1}).parent)
    found = checks(out)
    assert (found["greedy"]["chain"]["prompts"], found["fit"]) == (0, {})


def test_the_recipe_says_how_much_is_tried(project: Path) -> None:
    _, out = run(project, "checks.count=2", "checks.tokens=8")
    found = checks(out)
    assert found["greedy"]["chain"].items() >= {"prompts": 2, "tokens_each": 8}.items()
    assert found["fit"]["first"]["positions"] == 2 * 8


def test_from_the_places_of_its_steps_a_served_chain_commits_as_much(project: Path) -> None:
    """The check drafts in pages and blocks of its own making; what serves such a config is the oracle."""
    _, out = run(project)
    bundle = load_bundle(out)
    prompts = [text for _, text in read_prompts(project / "prompts.jsonl")]
    requests = [chat_request(bundle, text, SamplingParams(), TOKENS) for text in prompts]
    plain = make_engine(bundle, policy="off").generate(requests)
    drafters = {role: drafter for role, drafter in bundle.drafters.items() if isinstance(drafter, Drafter)}
    tried = {role: candidate_configs(drafter.config, bundle.tokenizer)[0] for role, drafter in drafters.items()}
    # the anchor's row would give a draft more than the recipe's block has
    names = {"as declared", "layer ids minus one", "layer ids plus one", "causal layers"}
    tried = {
        role: [reading for reading in some if reading.name in names or "mask" in reading.name]
        for role, some in tried.items()
    }
    before = [drafter.config for drafter in drafters.values()]
    found = evaluate_configs(bundle, drafters, tried, plain)
    assert [drafter.config for drafter in drafters.values()] == before, "the bundle stays as it was"
    means = []
    for role, drafter in drafters.items():
        for reading, guesses in found[role].items():
            read = _read_as(bundle, role, drafter, replace(reading.config, mask_token_id=reading.mask))
            alone = make_engine(replace(bundle, drafters={DrafterRole.FIRST: read}), policy="chain")
            lengths = torch.split(guesses.lengths, [len(sequence.answer) for sequence in plain])
            for sequence, ahead in zip(alone.generate(requests), lengths, strict=True):
                assert steps_over(ahead.tolist()) == sequence.stats.steps, (role, reading)
            means.append(guesses.mean)
    assert len(means) == 2 * 5
    assert len(set(means)) >= 2 * 4, "hardly two are alike, so none was taken for another"


def steps_over(lengths: list[int]) -> int:
    """Steps of a chain that commits so many tokens from each place."""
    steps = place = 0
    while place < len(lengths):
        place += lengths[place]
        steps += 1
    return steps


def test_of_several_better_readings_the_best_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    worst = guesses(0, 40, length=100)[0]
    better = [guesses(40, length=length)[0] for length in (150, 200, 180, 100, 100, 100)]
    asked = config(), tokenizer(64, {}, pad=7)
    found = dict(zip(candidate_configs(*asked)[0], [worst, *better], strict=True))
    monkeypatch.setattr("d2sd.build.validate.drafter_config.evaluate_configs", lambda *given: {FIRST: found})
    bundle = bundle_of(*asked)
    with pytest.raises(BuildError, match=r"from 100\.00 to 200\.00 tokens a step with layer ids plus one"):
        check_drafter_config(bundle, [cast("Sequence", None)])


def bundle_of(config: DrafterConfig, tokenizer: Any) -> Any:
    """A bundle of a first drafter alone, without the rest."""
    sources = SimpleNamespace(sources={FIRST: SimpleNamespace(path="mine")})
    recipe = SimpleNamespace(drafters=sources, path=Path, checks=SimpleNamespace(fit="fail"))
    return SimpleNamespace(drafters={FIRST: Drafter(config)}, tokenizer=tokenizer, recipe=recipe)


# --- What is tried ---------------------------------------------------------------------------------------------------


def tokenizer(size: int, added: dict[str, int], **known: int) -> Any:
    class Stub(SimpleNamespace):
        def __len__(self) -> int:
            return size

    fields = {f"{name}_token_id": known.get(name) for name in ("mask", "pad", "eos")}
    return Stub(get_added_vocab=lambda: added, **fields)


def config(**changes: Any) -> DrafterConfig:
    return replace(tiny_drafter(target().config, target_layer_ids=TAPS).config, **changes)


@pytest.mark.parametrize(
    ("known", "vocab", "masks"),
    [
        (tokenizer(60, {}, pad=50, eos=52), 64, [60, 50, 52, 63]),  # Qwen3, in small: an embedding longer than needed
        (tokenizer(64, {"<|reserved_special_token_0|>": 58, "<|eot_id|>": 61}, eos=61), 64, [61, 58, 63]),  # Llama 3
        (tokenizer(60, {"<|MASK|>": 59}), 64, [59, 60, 63]),  # SpecForge adds one
        (tokenizer(60, {"<|MASK|>": 59}, mask=58, pad=7, eos=7), 64, [58, 60, 7, 63]),
    ],
)
def test_masks_come_from_where_trainers_take_them(known: Any, vocab: int, masks: list[int]) -> None:
    found, _ = candidate_configs(config(vocab_size=vocab, mask_token_id=1), known)
    assert [reading.mask for reading in found if "mask" in reading.name] == masks
    assert {reading.layer_ids for reading in found[3:]} == {TAPS}
    again, _ = candidate_configs(config(vocab_size=vocab, mask_token_id=masks[0]), known)
    assert [reading.mask for reading in again if "mask" in reading.name] == masks[1:], (
        "what is declared is not tried twice"
    )


def test_what_cannot_be_run_is_left_out_with_the_reason() -> None:
    known = tokenizer(64, {}, pad=7)
    found, left_out = candidate_configs(
        config(target_layer_ids=(0, 3), mask_token_id=63, draft_vocabulary=(6, 7)), known
    )
    assert [reading.name for reading in found] == ["as declared", *OTHERS]
    assert left_out == {
        "layer ids minus one": "the target has no layer -1",
        "layer ids plus one": "the target has no layer 4",
        "mask 64 (the first id after the tokenizer)": "the vocabulary ends at 63",
        "mask 7 (the padding token)": "it is in the draft vocabulary",
    }


# --- What is clear ---------------------------------------------------------------------------------------------------


def guesses(won: int, lost: int = 0, same: int = 0, *, length: int = 2) -> tuple[Predictions, Predictions]:
    """Two readings of which the first wins and loses so many tokens; its steps are of `length`, the other's of 100."""
    hits = torch.tensor([1] * won + [0] * lost + [3] * same)
    other = torch.tensor([0] * won + [1] * lost + [3] * same)
    steps = torch.full_like(hits, 100)
    return Predictions(steps * 0 + length, hits), Predictions(steps, other)


@pytest.mark.parametrize(
    ("won", "lost", "same", "clear"),
    [
        (14, 0, 40, True),  # 2^-14 = 0.6e-4
        (13, 0, 40, False),  # 2^-13 = 1.2e-4
        (40, 10, 0, True),
        (40, 20, 0, False),
        (0, 0, 40, False),
        (0, 40, 0, False),
    ],
)
def test_what_chance_would_not_do(won: int, lost: int, same: int, clear: bool) -> None:
    assert sign_test(*guesses(won, lost, same)) == clear


def one_other(monkeypatch: pytest.MonkeyPatch, declared: Predictions, other: Predictions) -> Any:
    """A bundle of one drafter, of which two readings say this."""
    asked = config(target_layer_ids=(0, 1), draft_vocabulary=(7, 9)), tokenizer(64, {}, pad=7)
    found = candidate_configs(*asked)[0]
    assert [reading.name for reading in found] == ["as declared", "layer ids plus one", *OTHERS]
    said = dict(zip(found, [declared, other, *[declared] * len(OTHERS)], strict=True))
    monkeypatch.setattr("d2sd.build.validate.drafter_config.evaluate_configs", lambda *given: {FIRST: said})
    return bundle_of(*asked)


def test_a_slightly_better_config_is_reported_without_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other, declared = guesses(40, length=104)
    check_drafter_config(one_other(monkeypatch, declared, other), [cast("Sequence", None)])
    assert "commits 104.000 tokens a step with layer ids plus one, 100.000 as declared" in capsys.readouterr().err
    other, declared = guesses(40, length=105)
    with pytest.raises(BuildError, match=r"from 100\.00 to 105\.00"):
        check_drafter_config(one_other(monkeypatch, declared, other), [cast("Sequence", None)])


@pytest.mark.parametrize(("won", "lost", "length"), [(13, 0, 200), (40, 0, 99), (40, 30, 200)])
def test_an_unclear_difference_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], won: int, lost: int, length: int
) -> None:
    other, declared = guesses(won, lost, length=length)
    check_drafter_config(one_other(monkeypatch, declared, other), [cast("Sequence", None)])
    assert capsys.readouterr().err == ""
