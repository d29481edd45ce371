"""Random models and requests of a configuration."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.plugins.cpu import library
from d2sd.runtime.grammar.grammar import Grammar
from d2sd.runtime.request import Request
from d2sd.runtime.sampling.sample import GREEDY_BELOW
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.thought import Markers
from tests.runtime.configurations import BLOCKS, DENSE, EAGLE, Configuration
from tests.runtime.grammar.tokens import END, guidance, vocab_size
from tests.runtime.helpers import BLOCK, WINDOWS
from tests.runtime.soak import VOCABULARY, Thirds, decode
from tests.tiny import HEADS, HYBRIDS, policy_name, tiny_decoder, tiny_drafter, tiny_eagle, tiny_flex

Models = tuple[Decoder, DraftModel, Drafter, FlexHead | None]
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROWS: dict[str, dict[str, Any]] = {"all": {}, "causal": {"causal": (True,)}, "sinks": {"sinks": True}}
BROKEN = torch.nan, torch.nan, torch.inf, -torch.inf, 3e38, 1e38, -1e38, 1e30, 1e19, -1e19
NOT_FINITE = torch.nan, torch.inf, -torch.inf


def vocabulary(one: Configuration) -> int:
    """Size of the vocabulary: a tokenizer's where grammars need one."""
    return vocab_size() if one.grammar == "guided" else VOCABULARY


def models(dice: random.Random, one: Configuration) -> Models:
    """A random target and its drafters."""
    seed = dice.randrange(50)
    windows, *behind = WINDOWS[one.windows]
    layers, size = dice.choice((2, 3, 3, 4)), 8 if one.kernels == "of other heads" else 16
    given: dict[str, Any] = {"windows": (windows * layers)[:layers]} if windows and one.family not in HYBRIDS else {}
    target = tiny_decoder(
        one.family,  # type: ignore[arg-type]
        layers=layers,
        head_dim=size,
        tie=dice.random() < 0.5,
        seed=seed,
        vocab=vocabulary(one),
        **given,
    )
    second_head = dice.choice([None, *HEADS.values()])
    first, second = (
        tiny_drafter(
            target.config,
            layers=1,
            head=head,
            attention={"windows": seen[:1]} | ROWS[one.rows],
            role="variable_prefix" if place else "first",
            seed=1 + place,
            **BLOCKS[one.blocks][place],
        )
        for place, (head, seen) in enumerate(zip((HEADS.get(one.head), second_head), behind, strict=True))
    )
    ids = None
    if one.ids == "some":  # never the mask, which is the last one
        ids = tuple(sorted(dice.sample(range(vocabulary(one) - 1), vocabulary(one) * 2 // 3)))
        first, second = (narrowed(drafter, ids) for drafter in (first, second))
    made: list[Any] = [target, first, second]
    if one.head == EAGLE:
        made[1] = tiny_eagle(
            target.config,
            steps=first.config.drafts,
            draft_vocabulary=ids,
            target_layer_ids=first.config.target_layer_ids,
            seed=seed,
        )
    if one.family in DENSE:
        anchored = one.turns == "never" and one.policy != "flex_parallel" and dice.random() < 0.5
        made.append(tiny_flex(target, block_size=BLOCK, anchored=anchored, draft_vocabulary=ids))
    if one.drafts == "nan":
        for drafter in made[1:]:
            norm = drafter.mask_embedding if isinstance(drafter, FlexHead) else drafter.norm.weight
            norm.data.fill_(torch.nan)
    if one.weights == "broken":
        break_weight(made[0] if dice.random() < 0.8 else dice.choice(made), dice)
    target, first, second, *flex = (model.to(TYPES[one.type]) for model in made)
    return target, first, second, flex[0] if flex else None


def narrowed(drafter: Drafter, ids: tuple[int, ...] | None) -> Drafter:
    """The drafter, which says these tokens alone."""
    made = Drafter(replace(drafter.config, draft_vocabulary=ids))
    made.load_state_dict(drafter.state_dict())
    return made.eval().requires_grad_(False)


@torch.no_grad()
def break_weight(model: torch.nn.Module, dice: random.Random) -> None:
    """Break a weight in a place, a row or everywhere; or what few tokens meet: an embedding, one expert's weights, one
    unit's bias.
    """
    weights = dict(model.named_parameters())
    kinds = ("embed_tokens",), (".gate_up", ".down"), ("bias",)
    few = [found for kind in kinds if (found := [name for name in weights if any(part in name for part in kind)])]
    single = dice.random() < 0.6 and few
    weight = weights[dice.choice(dice.choice(few) if single else [*weights])]
    place = tuple(dice.randrange(size) for size in weight.shape)
    part = place[: dice.choice((1, 1, 2, 3) if single else (0, 1, 1, 2, 2, 2))]
    weight[part] = dice.choice(BROKEN if library.available() else NOT_FINITE)


def parameters(dice: random.Random, one: Configuration, seed: int) -> SamplingParams:
    """Greedy or sampled in the usual ways; or each parameter off, at a usual value, or at a bound."""
    if one.sampling == "greedy":
        return SamplingParams(seed=seed)
    if one.sampling == "sampled":
        return SamplingParams(dice.choice((0.7, 1.0)), dice.choice((1.0, 0.9)), dice.choice((0, 5, 20)), seed=seed)

    def value(off: float, *others: float) -> float:
        return off if dice.random() < 0.65 else dice.choice(others)

    def token() -> int:
        return dice.randrange(VOCABULARY)

    biases = {token(): dice.choice((-100.0, 100.0, 3.0, -1.5)) for _ in range(dice.choice((0, 0, 0, 1, 4, VOCABULARY)))}
    words = [tuple(token() for _ in range(dice.randrange(1, 5))) for _ in range(dice.choice((0, 0, 0, 1, 9, 90)))]
    return SamplingParams(
        temperature=dice.choice((0.0, 0.0, 0.8, 1.0, 1.0, GREEDY_BELOW, GREEDY_BELOW / 2, 99.9)),
        top_p=value(1.0, 0.9, 0.5, 1e-300),
        top_k=int(value(0, 1, 5, 20, 2**31 - 1)),
        seed=seed,
        min_p=value(0.0, 0.1, 1.0, 1e-45, 1e-300),
        repetition_penalty=value(1.0, 1.3, 0.7, 0.01, 100.0),
        presence_penalty=value(0.0, 1.0, 2.0, -2.0),
        frequency_penalty=value(0.0, 1.0, 2.0, -2.0),
        logit_bias=biases,
        bad_words_token_ids=words,
        min_tokens=dice.choice((0, 0, 0, 1, 5)),
        thinking_token_budget=dice.choice((None, None, 0, 1, 2, 3, 5, 8, 13)),
        logprobs=dice.choice((None, None, None, 0, 3, 20)),
        prompt_logprobs=dice.choice((None, None, None, 0, 3, 20)),
    )


def switch(dice: random.Random, one: Configuration) -> Any:
    """Whether a request speculates, or by which policy."""
    named = {"policy": "chain" if one.policy == "auto" else policy_name(one.policy)}
    return True if one.switch == "on" else dice.choice((True, False, False, named))


@cache
def grammars(kind: str) -> list[Grammar]:
    """Answers that never end, or that a tokenizer's text ends: short ones, long ones, and choices."""
    if kind == "thirds":
        return [Thirds()]
    tool = guidance()
    return [
        tool.regex("[a-f]{3,9}(-[0-9]{2}){2}", "regex"),
        tool.json_schema('{"type": "object"}', "json"),
        tool.lark('start: "yes" | "no, never" | "maybe"', "choice"),
    ]


def requests(dice: random.Random, one: Configuration) -> list[Request]:
    """Some requests whose prompts begin alike, with different seeds."""
    found = list[Request]()
    for seed in range(dice.randrange(2, 9)):
        prompt = tuple(dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, 16)))
        if found and dice.random() < 0.4:
            prompt = (dice.choice(found).prompt + prompt)[:20]
        stop = tuple(decode([dice.randrange(VOCABULARY) for _ in range(dice.choice((1, 1, 2)))]) for _ in range(3))
        grammar = dice.choice(grammars(one.grammar)) if one.grammar != "none" and dice.random() < 0.6 else None
        ends = {END} if one.grammar == "guided" else set[int]()
        sampling = replace(parameters(dice, one, dice.randrange(2**27) * 16 + seed), speculative=switch(dice, one))
        liked = max(
            sampling.logit_bias, key=lambda token: sampling.logit_bias[token], default=0
        )  # may begin the answer
        markers = Markers("", "", dice.choice((prompt[-1], prompt[-2:][0], liked)), dice.randrange(VOCABULARY))
        found.append(
            Request(
                prompt,
                dice.randrange(5, 23),
                sampling,
                frozenset({*dice.sample(range(VOCABULARY), dice.choice((0, 0, 1, 9))), *ends}),
                stop if dice.random() < 0.3 else (),
                dice.random() < 0.5,
                grammar,
                markers,
                dice.choice((0, 0, 0, 1)),
                client=("", "", "a", "b")[seed % 4],
            )
        )
    return found
