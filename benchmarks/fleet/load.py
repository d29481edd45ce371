"""Synthetic load: requests at random times of a given rate (open loop), or a number of users (closed loop)."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from benchmarks.fleet.accepted import DRAWS
from benchmarks.fleet.worker import Stream

Positive = Annotated[int, Field(ge=1)]


class Load(BaseModel):
    """The same load and seed give the same requests, whatever serves them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: Positive
    prompt_tokens: Positive  # ISL, input sequence length
    output_tokens: Positive  # OSL, output sequence length
    #: Lengths are uniform within this share of the above, as `--random-range-ratio` of vLLM's benchmark.
    length_spread: Annotated[float, Field(ge=0, le=1)] = 0.0
    #: Exactly one of both.
    rate: Annotated[float, Field(gt=0)] | None = None  # requests a second, Poisson
    concurrency: Positive | None = None  # users who send the next request when the last one ends
    #: Leading prompt tokens that all requests of a group share.
    shared_tokens: Annotated[int, Field(ge=0)] = 0
    groups: Positive = 1
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _one_loop(self) -> Self:
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("needs exactly one of rate and concurrency")
        return self

    def streams(self, profiles: int) -> list[Stream]:
        """The requests in order; `profiles` is the number of distributions of accepted lengths."""
        draw = np.random.default_rng(self.seed)
        gaps = draw.exponential(1 / self.rate if self.rate else 0.0, self.requests)
        times = np.cumsum(gaps)
        prompts, outputs = (self._lengths(draw, mean) for mean in (self.prompt_tokens, self.output_tokens))
        kinds, groups = draw.integers(profiles, size=self.requests), draw.integers(self.groups, size=self.requests)
        streams = []
        for i in range(self.requests):
            shared = min(self.shared_tokens, prompts[i])
            one = Stream(
                i, float(times[i]), (), outputs[i], int(kinds[i]), draw.integers(DRAWS, size=outputs[i]).tolist()
            )
            one.prompt = (int(groups[i]),) * shared + (one.token,) * (prompts[i] - shared)
            streams.append(one)
        return streams

    def _lengths(self, draw: np.random.Generator, mean: int) -> list[int]:
        low, high = round(mean * (1 - self.length_spread)), round(mean * (1 + self.length_spread))
        return [int(length) for length in draw.integers(max(1, low), max(1, high) + 1, size=self.requests)]
