"""transformers, asked as `endtoend_worker` is: one request by a static cache and compiled decoding, several by its
continuous batching. It imports nothing of d2sd and runs with the Triton that PyTorch came with.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch


class Peer:
    """A model of transformers, and the prompts."""

    def __init__(self, given: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM, StaticCache
        from transformers.utils import logging

        logging.set_verbosity_error()
        begun = time.perf_counter()
        self.device, self.prompts = given["device"], json.loads(Path(given["requests"]).read_text())
        target = Path(given["bundle"]) / "target"
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16, local_files_only=True)
        self.model = model.to(self.device).eval()
        longest = max(map(len, self.prompts["ids"])) + 160
        self.cache = StaticCache(config=self.model.config, max_cache_len=longest)
        for _ in range(2):
            self.one(self.prompts["ids"][0], 24)
        self.seconds = time.perf_counter() - begun

    def one(self, ids: list[int], tokens: int) -> list[int]:
        """The answer to one prompt."""
        self.cache.reset()
        given = torch.tensor([ids], device=self.device)
        found = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            past_key_values=self.cache,
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=self.prompts["stop"],
            pad_token_id=self.prompts["stop"][0],
        )
        return self._cut(found[0, len(ids) :].tolist())

    def _cut(self, answer: list[int]) -> list[int]:
        ends = [place for place, token in enumerate(answer) if token in self.prompts["stop"]]
        return answer[: ends[0] + 1] if ends else answer

    def many(self, prompts: list[list[int]], tokens: int, in_flight: int) -> list[list[int]]:
        """The answers by continuous batching."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        options = GenerationConfig(
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=self.prompts["stop"],
            pad_token_id=self.prompts["stop"][0],
        )
        batching = ContinuousBatchingConfig(max_requests_per_batch=in_flight, max_memory_percent=0.1)
        found = self.model.generate_batch(
            prompts, generation_config=options, continuous_batching_config=batching, persistent_manager=True
        )
        return [self._cut(one.generated_tokens) for one in found.values()]

    def flights(self, at: dict[str, int], tokens: int) -> list[dict[str, Any]]:
        """Serve them as `endtoend_worker` does; what fails has its reason."""
        found = []
        for in_flight, count in at.items():
            prompts, n = self.prompts["ids"][:count], int(in_flight)
            try:
                if n > 1:  # a manager is sized for the requests that it sees first, and captures graphs then
                    self.model.destroy_cached_continuous_batching_manager()
                    self.many(prompts[:n], tokens, n)
                begun = time.perf_counter()
                answers = [self.one(ids, tokens) for ids in prompts] if n == 1 else self.many(prompts, tokens, n)
                seconds = time.perf_counter() - begun
                count_tokens = sum(map(len, answers))
                found.append(
                    {"in_flight": n, "seconds": seconds, "tokens": count_tokens, "tau": 1.0, "answers": answers}
                )
            except Exception as error:
                found.append({"in_flight": n, "error": f"{type(error).__name__}: {error}"[:300]})
        return found


def main() -> None:
    peer = Peer(json.loads(sys.argv[1]))
    print("@" + json.dumps({"ready": True, "load_s": peer.seconds, "warm_s": 0.0, "compiled": 0}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            print("@" + json.dumps({"result": getattr(peer, asked.pop("do"))(**asked), "device_ms": {}}), flush=True)
        except Exception as error:
            print("@" + json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}), flush=True)


if __name__ == "__main__":
    main()
