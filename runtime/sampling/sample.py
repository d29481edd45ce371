"""The target's token after one row: argmax, or Gumbel-max over the filtered distribution.

argmax(logits / T + gumbel) is an exact sample of softmax(logits / T). Drafts never change the tokens chosen here, only
how many of them one step commits.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from d2sd.modeling.where import mapped
from d2sd.plugins.choice import SamplingTensors, sampled_scores
from d2sd.plugins.choice.reference import FILTERS, gumbel
from d2sd.runtime.sampling.bias import TokenBias
from d2sd.runtime.sampling.penalties import NO_TEXT, Penalties, Text
from d2sd.runtime.sampling_params import SamplingParams

# Shape letters: B requests, D distinct depths, V vocabulary.


#: Lower temperatures decode greedily: logits / T would overflow, and the noise no longer changes the argmax.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class Sampling(SamplingTensors):
    """Sampling parameters of a batch; the flags, and which parts are None, choose between static variants."""

    bias: TokenBias | None
    penalties: Penalties | None
    logprobs: int | None  # most tokens a row whose log-probabilities a request asks for; None: no request asks

    @staticmethod
    def of(
        params: SequenceOf[SamplingParams], vocab_size: int, device: str, texts: SequenceOf[Text] | None = None
    ) -> Sampling:
        """`texts` are the requests' tokens so far, for parameters that depend on them; None: all are empty."""
        return mapped(Sampling.pack(params, vocab_size, device, texts), lambda tensor: tensor.to(device))

    @staticmethod
    def pack(
        params: SequenceOf[SamplingParams], vocab_size: int, device: str, texts: SequenceOf[Text] | None = None
    ) -> Sampling:
        """Like `of`, but all except tables of biases and penalties is on the host."""
        seeds = [p.seed or 0 for p in params]
        signed = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]  # the same 64 bits
        texts = [NO_TEXT] * len(params) if texts is None else texts
        logprobs = [p.logprobs for p in params if p.logprobs is not None]
        used = [_filters_of(p, vocab_size) for p in params]

        def fp32(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32)

        return Sampling(
            temperature=fp32([p.temperature if p.temperature >= GREEDY_BELOW else 0.0 for p in params]),
            top_p=fp32([p.top_p if p.top_p < 1 else torch.inf for p in params]),
            top_k=torch.tensor([min(p.top_k or vocab_size, vocab_size) for p in params]),
            min_p=fp32([p.min_p for p in params]),
            filtered=torch.tensor([bool(names) for names in used], dtype=torch.int32),
            seed=torch.tensor(signed),
            any_sampled=any(p.temperature >= GREEDY_BELOW for p in params),
            used=tuple(name for name in FILTERS if any(name in names for names in used)),
            bias=TokenBias.of(params, texts, vocab_size, device) if any(p.has_bias for p in params) else None,
            penalties=Penalties.of(params, texts, vocab_size, device) if any(p.has_penalty for p in params) else None,
            logprobs=max(logprobs, default=None),
        )

    @property
    def changes_logits(self) -> bool:
        return self.bias is not None or self.penalties is not None

    def with_all_filters(self) -> Sampling:
        """Parameters as if a request used each filter, if any is used: those that no request uses keep all tokens."""
        return replace(self, used=FILTERS if self.used else ())

    def change_at(self, logits: Tensor, context_len: Tensor, tokens: Tensor) -> Tensor:
        """Drafted logits [B, ...] of `tokens` [B, ...], changed by the tokens committed so far."""
        flat, ids = logits.flatten(1), tokens.flatten(1)
        if self.bias is not None:
            flat = self.bias.apply_at(flat, context_len + 1, ids)
        if self.penalties is not None:
            flat = self.penalties.apply(flat, ids)
        return flat.view_as(logits)

    def after(self, token: Tensor) -> Sampling:
        """The parameters once `token` [B] has been appended to each text."""
        if not self.changes_logits:
            return self
        return replace(
            self,
            bias=self.bias and self.bias.after_token(token),
            penalties=self.penalties and self.penalties.after(token),
        )

    def select(self, rows: Tensor) -> Sampling:
        """The parameters of the requests `rows` [R]."""

        def select(tensor: Tensor) -> Tensor:
            return tensor[rows]

        return replace(
            mapped(self, select),
            bias=self.bias and self.bias.select(rows),
            penalties=self.penalties and mapped(self.penalties, select),
        )

    def noise(self, context_len: Tensor, depths: int, vocab_size: int) -> Tensor | None:
        """Gumbel noise [B, D, V] of the tokens chosen at `depths` depths after `context_len` [B]; None if all greedy.

        The row at depth d is at position context_len + d and chooses the token at the next one.
        """
        if not self.any_sampled:
            return None
        return gumbel(self.seed, context_len[:, None] + 1 + torch.arange(depths, device=self.seed.device), vocab_size)


def _filters_of(params: SamplingParams, vocab_size: int) -> set[str]:
    """Names of the filters that a request uses."""
    on = {"min_p": params.min_p > 0, "top_k": 0 < params.top_k < vocab_size, "top_p": params.top_p < 1}
    return {name for name in FILTERS if on[name]} if params.temperature >= GREEDY_BELOW else set()


def token_scores(
    logits: Tensor, position: Tensor, sampling: Sampling, noise: Tensor | None, allowed: Tensor | None = None
) -> Tensor:
    """Scores [B, V] of the token at `position` [B], whose argmax is the target's choice.

    logits [B, V] fp32, of the row before it; `noise` [B, V] at that position, None if all requests are greedy;
    `allowed` [B, V] bool, False for tokens that a grammar excludes. In the order of vLLM: bias, bad words and
    min_tokens, then penalties, temperature, filters.
    """
    if sampling.bias is not None:
        logits = sampling.bias.apply(logits, position)
    if sampling.penalties is not None:
        logits = sampling.penalties.apply(logits)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    return logits if noise is None else sampled_scores(logits, sampling, noise)
