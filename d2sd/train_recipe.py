"""The training recipe: one YAML that says which drafters are trained, on what, and how.

Unknown keys are errors everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from d2sd.recipe import Name, Part, Positive, Precision, RecipeFile, Target, read_yaml, validated

Share = Annotated[float, Field(ge=0, le=1)]
Above0 = Annotated[float, Field(gt=0)]


class PromptFile(Part):
    """A JSONL file of {id, turns}; first turns are used."""

    path: str
    #: how many, drawn at random; absent: all
    count: Positive | None = None


class SelfWritten(Part):
    """User turns that the target writes itself behind its chat template's user header."""

    count: Positive
    #: how a turn may begin, drawn at random, to steer towards code, questions, essays; "" leaves it to the target
    openings: list[str] = Field(default=[""], min_length=1)
    #: diversity is what they are for
    temperature: Above0 = 1.0
    #: longer ones are dropped
    max_tokens: Positive = 96


class Data(Part):
    """Prompts, and the limits of what is made of them."""

    prompts: list[PromptFile]
    #: absent: the files alone
    self_written: SelfWritten | None = None
    #: longer prompts are left out
    max_prompt_tokens: Positive = 224
    #: tokens of an answer: the start of an answer is where most of serving happens, and short ones buy more prompts
    max_new_tokens: Positive = 144
    #: answers kept out of training, to estimate tau on
    held_out: Positive = 48


class Geometry(Part):
    """Both drafters' shape; widths and heads are the target's."""

    layers: Positive
    block_size: Annotated[int, Field(ge=2)]
    #: a token that ordinary text never holds
    mask_token_id: Annotated[int, Field(ge=0)]
    #: id i is the output of target layer i; strictly ascending
    target_layer_ids: list[int]


class TrainSettings(Part):
    """Everything that decides the result of one drafter's training; a resumed run must have the same."""

    steps: Positive
    #: sequences a step
    batch: Positive = 8
    #: blocks a sequence, at random anchors
    blocks: Positive = 64
    #: what the shipped drafters were trained with
    learning_rate: Above0 = 1e-3
    #: share of the steps that raises the learning rate, as in DFlash
    warmup: Share = 0.04
    #: of AdamW, its own default
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    #: gradient norm
    clip: Above0 = 1.0
    #: of slot weights exp(-distance / decay): 4 for block 8 (arXiv 2602.06036)
    decay: Above0 = 4.0
    #: share of the label on the real token; the rest is the target's distribution
    hard: Share = 0.3
    #: variable prefix only: Pr(n visible tokens) ∝ base^n, as published
    prefix_base: Above0 = 0.9
    #: variable prefix only: share of blocks that start where the first drafter goes wrong
    on_rejection: Share = 0.5
    #: ids outside the answers' vocabulary drawn each step
    negatives: Annotated[int, Field(ge=0)] = 1024
    #: fixed: the same recipe gives the same drafter
    seed: Annotated[int, Field(ge=0)] = 0
    #: steps between two saved states
    save_every: Positive = 100


class TrainRecipe(RecipeFile):
    """The recipe of a pair of drafters."""

    #: version of this schema; a reader of another version must refuse, not guess
    d2sd_train: Literal[1]
    name: Name
    target: Target
    #: the target's, when it answers and gives features; drafters train in fp32 under bf16 autocast
    precision: Precision = "bf16"
    #: requests answered together
    max_batch: Positive = 64
    drafter: Geometry
    data: Data
    first: TrainSettings
    #: starts from the trained first drafter; absent: none is trained
    second: TrainSettings | None = None

    @model_validator(mode="after")
    def _ascending(self) -> TrainRecipe:
        ids = self.drafter.target_layer_ids
        if not ids or ids != sorted(set(ids)) or ids[0] < 0:
            raise ValueError(f"drafter.target_layer_ids {ids} is not strictly ascending from 0 or more")
        return self


def load_train_recipe(path: Path) -> TrainRecipe:
    """Read a training recipe. Raises `RecipeError` naming file and key."""
    return validated(TrainRecipe, read_yaml(path), path).at(path.parent)
