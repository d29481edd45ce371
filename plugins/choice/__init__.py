"""From logits to tokens: the target's choice after every row, and the candidates of a draft.

reference.py   the specification in plain PyTorch
cpu.py         the largest of a row, by the compiled library; the rest of the CPU path is the specification
triton/        the kernels and their launchers
"""

from __future__ import annotations

from torch import Tensor

from d2sd.plugins import dispatch
from d2sd.plugins.choice.cpu import argmax, likeliest_cpu
from d2sd.plugins.choice.reference import (
    SamplingTensors,
    best_token,
    choose_reference,
    likeliest,
    pool_size_of,
    ranked,
    sampled_scores,
)
from d2sd.plugins.dispatch import Implementation
from d2sd.plugins.trees.reference.branches import mask_rejected
from d2sd.plugins.trees.types import Branches, Draft
from d2sd.token_codes import NOT_FINITE

__all__ = ["WIDTH", "SamplingTensors", "best_token", "candidates", "choose", "reads_any_type", "sampled_scores"]

# Shape letters: B requests, K branches, S slots, N nodes, M candidates a slot, V vocabulary, Vd draft vocabulary:
# logits [..., Vd] belong to the ascending `ids [Vd]`. Tokens are the target's ids everywhere.

OP = "the choice of tokens"
#: Candidates of every slot in policies that draft siblings.
WIDTH = 16


def reads_any_type(x: Tensor) -> bool:
    """Whether logits on x's device need not be fp32, and sampling costs no more at all nodes than along one path: on
    CUDA, where kernels choose.
    """
    return dispatch.pick(OP, x) is Implementation.TRITON


def choose(logits: Tensor, context_len: Tensor, depth: Tensor, sampling: SamplingTensors) -> Tensor:
    """The target's token [B, N] after each node: logits [B, N, V], depth [B, N]; context_len [B], the root's position.

    `NOT_FINITE` where the best score is not finite. Parameters that change the logits are the caller's to apply.
    """
    picked = dispatch.pick(OP, logits, library=not sampling.any_sampled)
    if picked is Implementation.TRITON:
        from d2sd.plugins.choice.triton.launch import choose_triton

        return choose_triton(logits, context_len, depth, sampling if sampling.any_sampled else None)
    if picked is Implementation.LIBRARY:
        chosen = argmax(logits.float())
        return chosen.where(logits.gather(-1, chosen[..., None])[..., 0].isfinite(), NOT_FINITE)
    return choose_reference(logits, context_len, depth, sampling)


def candidates(
    logits: Tensor,
    context_len: Tensor,
    sampling: SamplingTensors,
    width: int,
    ids: Tensor | None = None,
    branches: Branches | None = None,
) -> Draft:
    """The `width` likeliest tokens of every slot: logits [B, K, S, V or Vd] -> [B, K, S, M].

    When the target samples, it takes argmax(logits / T + g) with noise g that depends on seed, position and token
    alone. Drafts are ranked by scores with the same g ("drafter-invariant" coupling, Daliri et al., arXiv 2408.07978):
    the output does not change, and more drafts are accepted. Penalties, filters and noise are applied to the
    CANDIDATE_POOL likeliest tokens only. Probabilities are normalised over the draft vocabulary.

    With `branches`, [B, K] of them, the token that each presumes rejected is left out of its slot (`mask_rejected`,
    which may happen in place).
    """
    picked = dispatch.pick(OP, logits, library=True)
    if picked is Implementation.TRITON and not sampling.changes_logits:
        from d2sd.plugins.choice.triton.launch import candidates_triton

        sampled, pool = sampling if sampling.any_sampled else None, pool_size_of(logits, sampling, width)
        return candidates_triton(logits, context_len, min(width, logits.shape[-1]), pool, ids, sampled, branches)
    if branches is not None:
        logits = mask_rejected(branches, logits, ids)
    largest = likeliest_cpu if picked is Implementation.LIBRARY else likeliest
    found = largest(logits.float(), pool_size_of(logits, sampling, width))
    return ranked(*found, context_len, sampling, width, ids)
