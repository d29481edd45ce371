"""The training recipe: one YAML that says which drafters are trained, on what, and how.

Unknown keys are errors everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from d2sd.errors import RecipeError
from d2sd.recipe import DrafterSource, Name, Part, Positive, Precision, RecipeFile, Target
from d2sd.schema import validated
from d2sd.shipped import find_recipe
from d2sd.yaml_reader import read_yaml

Share = Annotated[float, Field(ge=0, le=1)]
Above0 = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]


class PromptFile(Part):
    """A JSONL file of {id, turns}; first turns are used."""

    path: str
    #: how many, drawn at random; absent: all
    count: Positive | None = None


class SelfWritten(Part):
    """User turns of one kind that the target writes itself behind its chat template's user header."""

    #: of this kind, part of the turns' ids
    name: Name
    #: how many are tried; those unfinished or screened out are reported
    count: Positive
    #: how a turn may begin, drawn at random, to steer towards code, questions, essays; "" leaves it to the target
    openings: list[str] = Field(default=[""], min_length=1)
    #: diversity is what they are for
    temperature: Above0 = 1.0
    #: text that ends a turn and stays in it, next to the target's own end: a docstring's, for functions without a body
    end: str | None = None
    #: longer ones are dropped
    max_tokens: Positive = 96


class Data(Part):
    """Prompts, and the limits of what is made of them."""

    prompts: list[PromptFile]
    #: JSONL files of prompts kept for measuring: nothing that shares a run of words with one of them is trained on
    exclude: list[str] = Field(default=[])
    #: what files lack
    self_written: list[SelfWritten] = Field(default=[])
    #: longer prompts are left out
    max_prompt_tokens: Positive = 224
    #: tokens of an answer: the start of an answer is where most of serving happens, and short ones buy more prompts
    max_new_tokens: Positive = 144
    #: answers kept out of training; their prompts are what evaluations ask
    held_out: Positive = 48
    #: what the target says of every token, stored once, or computed whenever it is needed: for large targets
    features: Literal["cached", "online"] = "cached"


class Geometry(Part):
    """Both drafters' shape; widths and heads are the target's, or those of a ready first drafter."""

    layers: Positive
    block_size: Annotated[int, Field(ge=2)]
    #: a token that ordinary text never holds
    mask_token_id: Annotated[int, Field(ge=0)]
    #: id i is the output of target layer i; strictly ascending
    target_layer_ids: list[int]
    #: drafts are chosen among this many of the answers' most frequent ids: a smaller head to read; absent: among all
    draft_vocab_size: Annotated[int, Field(ge=2)] | None = None


class Objective(Part):
    """What a drafter minimises: the sum of named terms times these weights. `train/objectives/` defines them."""

    #: how the slots of a block weigh in the slot terms
    slots: Literal["uniform", "decay", "dpace"] = "decay"
    #: of exp(-distance / decay): 4 for block 8 (arXiv 2602.06036)
    decay: Above0 = 4.0
    #: of D-PACE, its authors' own
    smoothing: Share = 0.5
    #: slot terms: cross-entropy on the answer's token,
    ce: Weight = 0
    #: ... KL divergence from the target's distribution,
    kl: Weight = 0
    #: ... total variation from it: one minus the acceptance rate of rejection sampling,
    tv: Weight = 0
    #: ... minus that rate's logarithm,
    nla: Weight = 0
    #: ... and a mixture of kl and tv that goes over to tv as the rate grows
    lk: Weight = 0
    #: block terms: the first wrong slot, ...
    focal: Weight = 0
    #: ... and the expected accepted share
    chain: Weight = 0

    @property
    def terms(self) -> dict[str, float]:
        """Weight by name, of those that count."""
        named = {name: getattr(self, name) for name in ("ce", "kl", "tv", "nla", "lk", "focal", "chain")}
        return {name: weight for name, weight in named.items() if weight}

    @model_validator(mode="after")
    def _has_a_slot_term(self) -> Objective:
        if not self.terms.keys() - {"focal", "chain"}:
            raise ValueError("focal and chain only sharpen: one of ce, kl, tv, nla, lk needs a weight above 0")
        for key, slots in (("decay", "decay"), ("smoothing", "dpace")):
            if key in self.model_fields_set and self.slots != slots:
                raise ValueError(f"{key} says nothing about slots: {self.slots}")
        return self


class TrainSettings(Part):
    """Everything that decides the result of one drafter's training; a resumed run must have the same."""

    steps: Positive
    objective: Objective
    #: sequences a step, over all processes
    batch: Positive = 8
    #: sequences in one forward pass: memory grows with it, the result hardly changes
    micro_batch: Positive = 1
    #: blocks a sequence, at random anchors
    blocks: Positive = 32
    #: muon: for the matrices, with AdamW for the rest; adamw: for all, as published
    optimizer: Literal["muon", "adamw"] = "muon"
    #: for muon; DFlash's AdamW has 6e-4
    learning_rate: Above0 = 2e-3
    #: share of the steps that raises the learning rate, as in DFlash
    warmup: Share = 0.04
    #: AdamW's own default
    weight_decay: Weight = 0.01
    #: gradient norm
    clip: Above0 = 1.0
    #: logits are taken over the answers' most frequent ids, ...
    frequent: Positive = 8192
    #: ... and over this many of the others, drawn each step
    negatives: Annotated[int, Field(ge=0)] = 1024
    #: fixed: the same recipe gives the same drafter
    seed: Annotated[int, Field(ge=0)] = 0
    #: of the products; what is kept and updated is fp32
    precision: Literal["bf16", "fp32"] = "bf16"
    #: steps between two saved states
    save_every: Positive = 100
    #: steps between two evaluations on held-out prompts
    evaluate_every: Positive = 500


class SecondSettings(TrainSettings):
    """What a variable-prefix drafter's training needs in addition."""

    #: Pr(n visible tokens) ∝ base^n, as published
    prefix_base: Above0 = 0.9
    #: share of blocks that start where the first drafter goes wrong: it is asked nowhere else
    on_rejection: Share = 0.5
    #: the token that the first drafter says there is left out of the softmax, as it is when drafting
    mask_rejected: bool = True


class Evaluation(Part):
    """What a drafter is asked during its training and at its end: held-out prompts, greedily, on the real runtime."""

    #: the first of the held-out ones: with the tokens below, at 2 tokens a step, some 770 steps are judged
    prompts: Positive = 24
    #: of each answer
    max_new_tokens: Positive = 64


class TrainRecipe(RecipeFile):
    """The recipe of a pair of drafters."""

    #: version of this schema; a reader of another version must refuse, not guess
    d2sd_train: Literal[1]
    name: Name
    target: Target
    #: the target's, when it answers and gives features; drafters train in fp32 under bf16 autocast
    precision: Precision = "bf16"
    #: requests answered together
    max_batch: Annotated[int, Field(ge=1, le=4096)] = 64
    drafter: Geometry
    data: Data
    #: absent where the first drafter is ready
    first: TrainSettings | None = None
    #: a folder in the DFlash layout, as published ones are: it is copied, and the second drafter trained on it
    ready_first: DrafterSource | None = None
    #: starts from the first drafter; absent: none is trained
    second: SecondSettings | None = None
    #: a point of a curve costs little compared with the steps between two points
    evaluation: Evaluation = Evaluation()

    @model_validator(mode="after")
    def _ascending(self) -> TrainRecipe:
        ids = self.drafter.target_layer_ids
        if not ids or ids != sorted(set(ids)) or ids[0] < 0:
            raise ValueError(f"drafter.target_layer_ids {ids} is not strictly ascending from 0 or more")
        if self.evaluation.prompts > self.data.held_out:
            raise ValueError(
                f"evaluation.prompts {self.evaluation.prompts} is more than data.held_out {self.data.held_out}: "
                "evaluations ask held-out prompts"
            )
        return self

    @model_validator(mode="after")
    def _one_first(self) -> TrainRecipe:
        if (self.first is None) == (self.ready_first is None):
            raise ValueError("needs exactly one of `first` and `ready_first`")
        if self.ready_first is not None and self.second is None:
            raise ValueError("ready_first leaves nothing to train without `second`; add it")
        if self.ready_first is not None and self.drafter.draft_vocab_size is not None:
            raise ValueError("drafter.draft_vocab_size: a ready first drafter brings its own; remove it")
        return self


def load_train_recipe(path: Path) -> TrainRecipe:
    """Read a training recipe, by path or by the name of one in the package.

    Raises `RecipeError` naming file and key.
    """
    file, folder = find_recipe(path, "train")
    return validated(TrainRecipe, read_yaml(file), file, error=RecipeError).at(folder, file.resolve().parent)
