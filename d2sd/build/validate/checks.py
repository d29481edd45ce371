"""Checks that a bundle must pass before it is published; the figures go into `manifest.checks`.

Near ties: two computations of the same logits may disagree if the two best candidates are equal up to rounding.
Exported graphs: in shadow runs ONNX Runtime serves them, the PyTorch model runs on the same inputs, and the differences
of every output are recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from d2sd.build.validate.drafter_config import check_drafter_config
from d2sd.bundle.backends import aux_layer_ids
from d2sd.bundle.load import Bundle
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import can_run, make_engine
from d2sd.errors import BuildError
from d2sd.modeling.decoder import Decoder, DecoderOutput
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.kv_pool import Chunks, KVPool, Rows
from d2sd.policies import FACTS, DrafterRole, trees_of
from d2sd.progress import Progress, silent
from d2sd.prompts import OWN_PROMPTS, read_prompts
from d2sd.runtime.backends.exported import GraphDecoder, OnnxSession, Session, graph_drafter
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling.penalties import Text
from d2sd.runtime.sampling.sample import Sampling, token_scores
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.policy import make_policy
from d2sd.runtime.stats import mean_tau

#: Largest difference that counts as rounding, as a share of an output's largest number.
_BOUND = {"fp32": 1e-4, "fp16": 2e-2}


def check_graphs(bundle: Bundle, requests: list[Request], plain: list[list[int]]) -> dict[str, Any]:
    """Greedy answers of the graphs against `plain`, those of plain decoding, and the largest error of every output.

    Raises `BuildError` if an error is beyond rounding; not with FP8, where one input that rounds the other way changes
    all later values. ONNX Runtime does not support bf16 on a CPU: the result then says so.
    """
    recipe, folder = bundle.recipe, bundle.path / "onnx"
    if recipe.precision == "bf16":
        return {"graphs": "not run: ONNX Runtime does not support bf16 on CPUs"}
    target = ShadowDecoder(bundle.target, aux_layer_ids(bundle), OnnxSession(folder / "target.onnx"))
    drafters: dict[DrafterRole, DraftModel] = {}
    errors = {"target": target.errors}
    for role, plain_drafter in bundle.drafters.items():
        session = OnnxSession(folder / f"{role.folder}.onnx")
        drafters[role] = graph_drafter(plain_drafter, session, recipe.limits.page_size)
        errors[role.folder] = shadow(drafters[role], plain_drafter, role.folder)
    tree, runner = recipe.tree, ModelRunner(target, drafters, block_size=recipe.tree.depth)
    equal = {}
    for name in trees_of(drafters) or ["off"]:
        policy = make_policy(name, block_size=tree.block_size, branches=tree.branches, row_budget=tree.row_budget)
        answers = [sequence.answer for sequence in Engine(runner, policy, Limits.of(recipe.limits)).generate(requests)]
        equal[name] = sum(answer == expected for answer, expected in zip(answers, plain, strict=True))
    figures: dict[str, Any] = {"prompts": len(requests), "equal_to_plain_decoding": equal}
    for which, stats in errors.items():
        relative = stats.relative()
        figures[which] = {output: float(f"{error:.2g}") for output, error in relative.items()}
        if recipe.fp8 is None and max(relative.values()) > _BOUND[recipe.precision]:
            raise BuildError(
                f"The outputs of the graph of {which} differ from the model's.",
                where=folder / f"{which}.onnx",
                found=figures[which],
                expected=f"errors of at most {_BOUND[recipe.precision]} of an output's largest",
                fix="this is a bug in d2sd: report it",
            )
    return {"graphs": figures}


@dataclass(slots=True)
class ErrorStats:
    """Errors of one model's outputs, by output name."""

    of: str  # the model
    largest: dict[str, float] = field(default_factory=dict)  # |graph - model|
    scale: dict[str, float] = field(default_factory=dict)  # |model|, its largest

    def compare(self, name: str, output: Tensor, expected: Tensor) -> None:
        """Record the largest difference. Raises `BuildError` if only the model's numbers are finite.

        A target without drafters has no features: there is nothing to compare.
        """
        if not expected.numel():
            return
        if expected.isfinite().all() and not output.isfinite().all():
            raise BuildError(
                f"The outputs of the graph of {self.of} are not finite, and the model's are.",
                where=name,
                fix="this is a bug in d2sd: report it",
            )
        error = (output.float() - expected.float()).abs().max().item()
        self.largest[name] = max(self.largest.get(name, 0.0), error)
        self.scale[name] = max(self.scale.get(name, 0.0), expected.float().abs().max().item())

    def relative(self) -> dict[str, float]:
        """Largest difference as a share of the output's largest number; 0 where there is none."""
        return {name: error and error / max(self.scale[name], 1e-30) for name, error in self.largest.items()}


class ShadowDecoder(GraphDecoder):
    """Serves the outputs of a target's graph and compares them with the target's."""

    def __init__(self, target: Decoder, aux_layer_ids: tuple[int, ...], session: Session) -> None:
        super().__init__(target, aux_layer_ids, session)
        self._plain, self.errors = target, ErrorStats("target")

    def forward(
        self, tokens: Tensor, rows: Rows | Chunks, pool: KVPool, aux_layer_ids: tuple[int, ...] = ()
    ) -> DecoderOutput:
        out = super().forward(tokens, rows, pool, aux_layer_ids)
        plain = self._plain(tokens, rows, pool, self._aux_layer_ids)
        real = _real(rows)
        self.errors.compare("hidden", out.hidden[real], plain.hidden[real])
        self.errors.compare("features", out.features[real], plain.features[real])
        self.errors.compare("k", out.k[:, real], plain.k[:, real])
        self.errors.compare("v", out.v[:, real], plain.v[:, real])
        return out


def shadow(graph: DraftModel, plain: DraftModel, name: str) -> ErrorStats:
    """The errors of a drafter's graph, whose outputs are compared with the drafter's from now on."""
    errors, draft, keys_values = ErrorStats(name), graph.draft, graph.context_keys_values

    def compared(x: Tensor, rows: Rows, pool: KVPool) -> Tensor:
        hidden, real = draft(x, rows, pool), _real(rows)
        errors.compare("hidden", hidden[real], plain.draft(x, rows, pool)[real])
        return hidden

    def compared_context(features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        outputs, expected = keys_values(features, positions), plain.context_keys_values(features, positions)
        for kind, ours, theirs in zip("kv", outputs, expected, strict=True):
            errors.compare(kind, ours, theirs)
        return outputs

    graph.draft, graph.context_keys_values = compared, compared_context  # type: ignore[method-assign]
    return errors


def _real(rows: Rows | Chunks) -> Tensor:
    """[B, T] bool: True for real requests, as all chunks are.

    Padding requests use scratch page 0; their half-precision values diverge arbitrarily and are not compared.
    """
    if isinstance(rows, Chunks):
        return torch.ones_like(rows.positions, dtype=torch.bool)
    return (rows.where.pages[:, :1] != 0).expand_as(rows.positions)


#: The largest gap at which a difference counts as rounding: of fp32 logits of order 10, a hundred units in the last
#: place.
TIE_TOLERANCE = 1e-4


@torch.inference_mode()
def top2_margin(target: Decoder, tokens: list[int], sampling: SamplingParams | None = None) -> float:
    """Distance of the two best scores after `tokens`: of the logits if greedy, else of the Gumbel scores.

    All `tokens` count as the prompt, for parameters that depend on the answer.
    """
    device = str(target.embed_tokens.weight.device)
    logits = target.logits(target.full_pass(torch.tensor([tokens], device=device)).hidden[:, -1])
    text = Text(tokens, len(tokens))
    params = Sampling.of([sampling or SamplingParams()], target.config.vocab_size, device, [text])
    noise = params.noise(torch.tensor([len(tokens) - 1], device=device), 1, logits.shape[-1])
    position = torch.tensor([len(tokens)], device=device)
    scores = token_scores(logits, position, params, None if noise is None else noise[:, 0])
    best, second = scores[0].topk(2).values.tolist()
    return float(best - second)


def first_mismatch(answer: list[int], expected: list[int]) -> int | None:
    """Index of the first token that differs (or is missing in one of the two); None where the answers are equal."""
    return next((index for index, (a, b) in enumerate(zip_longest(answer, expected)) if a != b), None)


def check_bundle(bundle: Bundle, progress: Progress = silent) -> dict[str, Any]:
    """Decode the check prompts greedily under every policy and compare with plain decoding.

    Returns figures as JSON values, without timings: equal bundles must give equal figures. Raises BuildError
    if, in fp32, a policy's answer differs from plain decoding and the two best logits are not tied (in half precision
    rounding depends on batch shapes, so agreement is only reported); if a drafter is accepted clearly more often under
    another reading of its config (`drafter_config.py`); and if the first drafter's chain is below `checks.min_tau`.
    """
    recipe = bundle.recipe
    budget = min(recipe.checks.tokens, recipe.limits.max_context // 2)
    prompts = read_prompts(recipe.path(recipe.checks.prompts) if recipe.checks.prompts else OWN_PROMPTS)
    requests = [chat_request(bundle, text, SamplingParams(), budget) for _, text in prompts[: recipe.checks.count]]
    requests = [r for r in requests if len(r.prompt) + budget <= recipe.limits.max_context]
    sequences = make_engine(bundle, policy="off").generate(requests)
    plain = [s.answer for s in sequences]
    fit = check_drafter_config(bundle, sequences, progress)
    figures: dict[str, Any] = {}
    for policy in [name for name, facts in FACTS.items() if facts.proven and can_run(bundle.draft_configs, name)]:
        sequences = make_engine(bundle, policy=policy).generate(requests)
        equal = sum(s.answer == answer for s, answer in zip(sequences, plain, strict=True))
        figures[policy] = {
            "prompts": len(requests),
            "tokens_each": budget,
            "equal_to_plain_decoding": equal,
            "tau": round(mean_tau(s.stats for s in sequences), 4),
        }
        if recipe.precision == "fp32" and equal < len(requests):
            _explain(bundle, policy, [s.answer for s in sequences], plain, [r.prompt for r in requests])
        least, tau = recipe.checks.min_tau, figures[policy]["tau"]
        if policy == "chain" and least is not None and tau < least:
            raise BuildError(
                "The first drafter's accepted length is below the recipe's minimum.",
                where="recipe: checks.min_tau",
                found=f"{tau} tokens a step on {len(requests)} prompts",
                expected=f"at least {least}",
                fix="use the drafter that was trained for this target, or lower checks.min_tau",
            )
    graphs = check_graphs(bundle, requests, plain) if recipe.engines else {}
    return {"greedy": figures, "fit": fit} | graphs


def _explain(
    bundle: Bundle, policy: str, answers: list[list[int]], plain: list[list[int]], prompts: list[tuple[int, ...]]
) -> None:
    """Raise BuildError for the first difference where plain decoding's two best logits are not tied."""
    for prompt, answer, expected in zip(prompts, answers, plain, strict=True):
        index = first_mismatch(answer, expected)
        if index is None:
            continue
        gap = top2_margin(bundle.target, [*prompt, *expected[:index]])
        if gap > TIE_TOLERANCE:
            raise BuildError(
                f"The policy {policy} does not produce the tokens of plain decoding.",
                where=f"token {index} of an answer",
                found=answer[index : index + 1],
                expected=f"{expected[index : index + 1]} (logit gap {gap:.2g})",
                fix="this is a bug in d2sd: report it",
            )
