"""Checks that a drafter's config fits its target, by comparing it with other readings of the config.

A layer id that is off by one, another mask, a block that is causal and was not trained so, slots that predict the token
behind them: none raises an error. The drafter loads, runs and is accepted less often. Only acceptance shows it, so
plain decoding's answers are drafted under each reading. The serving runner drafts after every token of the answers: one
target pass for each set of layer ids, without decoding. All readings are tested on the same tokens, so a few prompts
are enough. The second drafter is run like the first, with blocks of an anchor and masks: the shortest of its prefixes.

Layer ids are written as "output of layer i" or, counting the embedding, as i + 1 (`convert/checkpoint/layout.py`). A
mask is a row of the target's embedding, and trainers choose different ones: the tokenizer's mask token
(ModelOpt, SpecForge), the first id after the tokenizer (z-lab's Qwen3 drafters: 151669), a reserved token (Llama 3),
the padding token, often itself the end of text, or a row that no token uses.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from math import comb
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.bundle.load import Bundle
from d2sd.convert.kinds import KINDS
from d2sd.errors import BuildError, D2SDError
from d2sd.io import MARKER, read_json
from d2sd.manifest import FIT_RATIO
from d2sd.modeling.config import BodyConfig, DrafterConfig
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.kv_pool import PoolSizes
from d2sd.modeling.prepare import prepare_for_inference
from d2sd.modeling.where import Where
from d2sd.plugins.trees import Branches
from d2sd.policies import DrafterRole
from d2sd.progress import Progress, silent
from d2sd.runtime.batch import Batch
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence

#: Another reading fails the build if it commits `FIT_RATIO` times more tokens a step (below, the build prints a hint)
#: and passes a sign test at this level, which is far below that of a single test of independent trials, because
#: neighbouring tokens are correlated and several readings are tested.
_CHANCE = 1e-4
#: Below this many tokens a step a drafter is almost never accepted: one draft in ten steps.
_NEVER = 1.1
#: Of RMSNorm, and of windows: what drafters are published with. A window shows only in texts that are longer.
_EPS, _WINDOWS = (1e-6, 1e-5), (512, 1024, 2048, 4096)


def check_drafter_config(bundle: Bundle, plain: SequenceOf[Sequence], progress: Progress = silent) -> dict[str, Any]:
    """Tokens a step of each drafter under each reading; `plain` are finished requests of plain decoding.

    Raises BuildError, or prints it (`checks.fit`), if another reading is clearly better than the declared one. Prints a
    warning if one is slightly better, and if a drafter is almost never accepted.
    """
    drafters = {role: drafter for role, drafter in bundle.drafters.items() if isinstance(drafter, Drafter)}
    if not plain:  # no prompt fits the context
        return {}
    longest = max(len(sequence.tokens) if sequence else 0 for sequence in plain)
    tried = {role: candidate_configs(drafter.config, bundle.tokenizer, longest) for role, drafter in drafters.items()}
    predictions = evaluate_configs(bundle, drafters, {role: some for role, (some, _) in tried.items()}, plain, progress)
    figures: dict[str, Any] = {}
    for role, ((declared, *others), left_out) in tried.items():
        guesses, name = predictions[role], role.key
        expected = guesses[declared].mean
        better = [reading for reading in others if sign_test(guesses[reading], guesses[declared])]
        best = max(better, key=lambda reading: guesses[reading].mean, default=declared)
        if best is not declared and guesses[best].mean >= FIT_RATIO * expected:
            error = _wrong_config(bundle, role, declared, best, guesses)
            if bundle.recipe.checks.fit == "fail" and not _trained_here(bundle, role):
                raise error
            print(f"warning: {error}", file=sys.stderr)
        elif guesses[best].mean > expected:
            print(
                f"the {name} drafter may not match its config: it commits {guesses[best].mean:.3f} tokens a "
                f"step with {best.name}, {expected:.3f} as declared",
                file=sys.stderr,
            )
        if guesses[declared].mean < _NEVER:
            print(
                f"the {name} drafter is almost never accepted: {guesses[declared].mean:.2f} tokens a step on the "
                "check prompts, and no other reading of its config is clearly better",
                file=sys.stderr,
            )
        figures[name] = {
            "positions": len(guesses[declared].lengths),
            "tokens a step": {reading.name: guesses[reading].mean for reading in (declared, *others)},
            "left out": left_out,
        }
    return figures


def candidate_configs(
    config: DrafterConfig, tokenizer: Any, longest: int = 0
) -> tuple[list[Hypothesis], dict[str, str]]:
    """List the readings to test, the declared one first and the others with one change each, and why some cannot run.

    `tokenizer` is the target's transformers tokenizer, `longest` the length of the longest text.
    """
    ids, mask = config.target_layer_ids, config.mask_token_id
    readings, left_out = [Hypothesis("as declared", config, mask)], dict[str, str]()
    for name, step in (("layer ids minus one", -1), ("layer ids plus one", 1)):
        moved = tuple(i + step for i in ids)
        outside = [i for i in moved if not 0 <= i < config.num_target_layers]
        if outside:
            left_out[name] = f"the target has no layer {outside[0]}"
        else:
            readings.append(Hypothesis(name, replace(config, target_layer_ids=moved), mask))
    seen: set[int | None] = {None, mask}
    for what, token in _masks(tokenizer, config.vocab_size).items():
        if token in seen or token is None:
            continue
        seen.add(token)
        name = f"mask {token} ({what})"
        if token >= config.vocab_size:
            left_out[name] = f"the vocabulary ends at {config.vocab_size - 1}"
        elif token in (config.draft_vocabulary or ()):
            left_out[name] = "it is in the draft vocabulary"
        else:
            readings.append(Hypothesis(name, config, token))
    if config.mask_embedding:
        name = f"mask {mask} of the target's table"
        readings.append(Hypothesis(name, replace(config, mask_embedding=False), mask))
    name = "drafts from the second row on" if config.sample_from_anchor else "drafts from the anchor's row on"
    readings.append(Hypothesis(name, replace(config, sample_from_anchor=not config.sample_from_anchor), mask))
    bodies, short = _bodies(config.body, longest)
    readings += [Hypothesis(name, replace(config, body=body), mask) for name, body in bodies.items()]
    return readings, left_out | short


def _bodies(body: BodyConfig, longest: int) -> tuple[dict[str, BodyConfig], dict[str, str]]:
    """Other readings of what the layers compute and see, and why some show in no text."""
    found, left_out = dict[str, BodyConfig](), dict[str, str]()
    layers, windowed = body.num_layers, tuple(window is not None for window in body.windows)
    for name, causal in (
        ("no causal layer", ()),
        ("causal layers", (True,) * layers),
        ("causal layers where there is a window", windowed),
    ):
        if causal != body.causal and (any(causal) or name == "no causal layer"):
            found[name] = replace(body, causal=causal)
    if any(windowed):
        widest = max(window for window in body.windows if window is not None)
        if longest > widest:
            found["no window"] = replace(body, windows=())
        else:
            left_out["no window"] = f"no text is longer than the window of {widest} tokens"
    else:
        for window in _WINDOWS:
            if longest > window:
                found[f"a window of {window}"] = replace(body, windows=(window,) * layers)
    eps = next(eps for eps in _EPS if eps != body.rms_norm_eps)
    found[f"eps {eps:g}"] = replace(body, rms_norm_eps=eps)
    return found, left_out


def _masks(tokenizer: Any, vocab_size: int) -> dict[str, int | None]:
    """Candidate mask ids by origin; None where the tokenizer has no such token."""
    added = sorted((token, text.lower()) for text, token in tokenizer.get_added_vocab().items())

    def spelled(word: str) -> int | None:
        return next((token for token, text in added if word in text), None)

    mask = tokenizer.mask_token_id
    return {
        "the tokenizer's mask token": spelled("mask") if mask is None else mask,
        "the first id after the tokenizer": len(tokenizer),
        "the padding token": tokenizer.pad_token_id,
        "the end of text": tokenizer.eos_token_id,
        "the first reserved token": spelled("reserved"),
        "the last id of the vocabulary": vocab_size - 1,
    }


def sign_test(one: Predictions, other: Predictions) -> bool:
    """Sign test over tokens: whether `one` predicts significantly more tokens better than `other` than it does worse.

    Tokens, not steps: one hard token ends every step that reaches it, up to γ - 1, and would count each time.
    """
    won, lost = int((one.hits > other.hits).sum()), int((one.hits < other.hits).sum())
    chance = sum(comb(won + lost, n) for n in range(won, won + lost + 1)) / 2 ** (won + lost)
    return bool(chance <= _CHANCE)


def _wrong_config(
    bundle: Bundle, role: DrafterRole, declared: Hypothesis, better: Hypothesis, guesses: dict[Hypothesis, Predictions]
) -> BuildError:
    """The error for a key of the drafter's config that has the wrong value."""
    source = bundle.recipe.drafters.sources[role]
    folder = f"the recipe's drafters.{role.key}" if source.path is None else bundle.recipe.path(source.path)
    config = f"{folder}/config.json"
    mistake = next(one for one in _MISTAKES if one.value(better) != one.value(declared))
    return BuildError(
        f"The {role.key} drafter does not fit: acceptance rises from {guesses[declared].mean:.2f} to "
        f"{guesses[better].mean:.2f} tokens a step with {better.name}.",
        where=f"{config}: {mistake.key}",
        found=mistake.value(declared),
        expected=mistake.value(better),
        fix=f"{mistake.fix}; or it is undertrained: train it longer, or set checks.fit to warn",
    )


def _trained_here(bundle: Bundle, role: DrafterRole) -> bool:
    """Whether `d2sd train` wrote the drafter's folder, and with it a config that says how it was trained."""
    source = bundle.recipe.drafters.sources[role]
    marker = bundle.recipe.path(source.path or "").parent / MARKER
    try:
        run = read_json(marker)["d2sd"]
    except (D2SDError, TypeError, KeyError):
        return False
    return source.path is not None and str(run).startswith("train ")


#: A drafter's place in a bundle, and the config under which it is run.
Place = tuple[DrafterRole, DrafterConfig]
# Shape letters: P positions (the tokens of the answers, and the steps that start before each), S = γ - 1 slots.


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One way to read a drafter: its config, and the token that is put where its mask stands."""

    name: str
    config: DrafterConfig
    mask: int

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.config.target_layer_ids


class Mistake(NamedTuple):
    """A key of a config that may be wrong."""

    key: str
    value: Callable[[Hypothesis], str]
    fix: str


_MISTAKES = (
    Mistake(
        "dflash_config.target_layer_ids",
        lambda reading: str(list(reading.layer_ids)),
        "set it to these ids, where i is the output of layer i; d2sd convert reads formats that count differently",
    ),
    Mistake(
        "dflash_config.mask_token_id",
        lambda reading: str(reading.mask),
        "set it to the id that the drafter was trained with",
    ),
    Mistake(
        "dflash_config.mask_token_id",
        lambda reading: "a tensor mask_embedding" if reading.config.mask_embedding else "no tensor mask_embedding",
        "remove the tensor mask_embedding, which the drafter was not trained with",
    ),
    Mistake(
        "dflash_config.sample_from_anchor",
        lambda reading: str(reading.config.sample_from_anchor).lower(),
        "set it to what the drafter was trained with: whether the anchor's row predicts the first draft",
    ),
    Mistake(
        "sliding_window",
        lambda reading: ", ".join(str(window or "none") for window, _ in reading.config.body.views),
        "correct layer_types and sliding_window",
    ),
    Mistake(
        "is_causal",
        lambda reading: ", ".join(str(causal).lower() for _, causal in reading.config.body.views),
        "set it to what the drafter was trained with, of all layers",
    ),
    Mistake(
        "rms_norm_eps",
        lambda reading: f"{reading.config.body.rms_norm_eps:g}",
        "set it to the value that the drafter was trained with",
    ),
)


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of a drafter under one reading."""

    lengths: Tensor  # [P] int64, tokens that the step would commit, bonus included
    hits: Tensor  # [P] int64, how many of the steps before it predicted the token, at most S

    @property
    def mean(self) -> float:
        """Tokens a step, over all positions. A served chain starts at only some of them: its tau differs slightly."""
        return round(float(self.lengths.double().mean()), 4)


def evaluate_configs(
    bundle: Bundle,
    drafters: Mapping[DrafterRole, Drafter],
    tried: Mapping[DrafterRole, SequenceOf[Hypothesis]],
    plain: SequenceOf[Sequence],
    progress: Progress = silent,
) -> dict[DrafterRole, dict[Hypothesis, Predictions]]:
    """Try every reading of every drafter on `plain`, finished requests of plain decoding.

    Readings with the same layer ids share one target pass.
    """
    predictions: dict[DrafterRole, dict[Hypothesis, Predictions]] = {role: {} for role in drafters}
    every = [(role, reading) for role, some in tried.items() for reading in some]
    common = min((reading.config.drafts for _, reading in every), default=0)
    with progress("checking that the drafters fit", len(every)) as advance:
        for ids in sorted({reading.layer_ids for _, reading in every}):
            readings = [(role, reading) for role, reading in every if reading.layer_ids == ids]
            places = dict.fromkeys((role, reading.config) for role, reading in readings)
            readers = {place: _read_as(bundle, place[0], drafters[place[0]], place[1]) for place in places}
            runner = _prefilled_runner(bundle, readers, plain)
            for role, reading in readings:
                place = role, reading.config
                served = cast("Mapping[Place, Drafter]", runner.drafters)[place]
                if served.head is not None:  # which asks what of a block is known
                    served.config = replace(reading.config, mask_token_id=reading.mask)
                predictions[role][reading] = _predictions(runner, place, reading.mask, common, plain, bundle)
                advance(1)
    return predictions


def _read_as(bundle: Bundle, role: DrafterRole, drafter: Drafter, config: DrafterConfig) -> Drafter:
    """The same weights under another config."""
    if config.body != drafter.config.body:  # layers are made by it
        kind = KINDS[config.kind]
        read: Drafter = kind.load(bundle.path / role.folder, drafter.norm.weight.dtype, config)
        kind.attach(read, bundle.target)
        return read
    other = copy.copy(drafter)
    other.config = config
    if drafter.mask_embedding is not None and not config.mask_embedding:
        other._parameters = {**drafter._parameters, "mask_embedding": None}
    return other


def _prefilled_runner(bundle: Bundle, drafters: Mapping[Place, Drafter], plain: SequenceOf[Sequence]) -> ModelRunner:
    """Make a runner with every text prefilled, one page per text, from page 1."""
    target, served = prepare_for_inference(bundle.target, drafters)
    runner = ModelRunner(target, cast("dict[DrafterRole, DraftModel]", served))
    runner.allocate(PoolSizes(1 + len(plain), max(len(sequence.tokens) for sequence in plain), states=2))
    state_ids = torch.tensor([1]) if runner.layout.state_bytes else None
    chunk = bundle.recipe.limits.prefill_chunk
    for page, sequence in enumerate(plain, 1):
        runner.copy_states([(0, 1)])
        for start in range(0, len(sequence.tokens), chunk):
            tokens = torch.tensor(sequence.tokens[start : start + chunk])
            where = Where(torch.tensor([[page]]), torch.tensor([start]), state_ids=state_ids)
            runner.prefill(tokens, [len(tokens)], where)
    runner.context.inject(cast("Collection[DrafterRole]", drafters))
    return runner


def _predictions(
    runner: ModelRunner, place: Place, mask: int, common: int, plain: SequenceOf[Sequence], bundle: Bundle
) -> Predictions:
    """Draft before every token, in batches of the bundle's max_batch."""
    slots = runner.block_size - 1
    lengths, hits = [], []
    for page, sequence in enumerate(plain, 1):
        text = torch.tensor(sequence.tokens)
        anchors = torch.arange(len(sequence.request.prompt) - 1, len(text) - 1)
        parts = torch.split(anchors, bundle.recipe.limits.max_batch)
        best = torch.cat([_draft(runner, place, mask, page, text[part], part) for part in parts])
        guessed = anchors[:, None] + 1 + torch.arange(slots)  # [P, S], which token a slot predicts
        right = (best == F.pad(text, (0, slots), value=-1)[guessed]).long()  # no token is known after the text
        lengths.append(1 + right.cumprod(1).sum(1))
        of_token = torch.zeros(len(text) + slots, dtype=torch.long)
        # of slots that all readings have: one with more would hit more often
        hits.append(of_token.index_add_(0, guessed[:, :common].flatten(), right[:, :common].flatten())[anchors + 1])
    return Predictions(torch.cat(lengths), torch.cat(hits))


def _draft(runner: ModelRunner, place: Place, mask: int, page: int, anchor: Tensor, position: Tensor) -> Tensor:
    """The top-1 tokens [P, S] after `anchor [P]` at `position [P]` of one text."""
    count, slots = len(anchor), runner.block_size - 1
    sampling = Sampling.of([SamplingParams()] * count, runner.vocab_size, runner.device)
    batch = Batch(anchor, Where(torch.full((count, 1), page), position), torch.ones(count, dtype=torch.bool), sampling)
    # Passed as kept prefix tokens, these masks replace the mask of the drafter's config.
    masks = torch.full((count, 1, slots), mask)
    branches = Branches(masks, torch.full((count, 1), slots), rejected=torch.full((count, 1), -1))
    return runner.drafts.second(batch, branches, cast("DrafterRole", place), 1).top1[:, 0]
