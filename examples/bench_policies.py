"""Tokens per step of three tree policies: python examples/bench_policies.py bundles/smollm2-135m

`d2sd bench` is the real benchmark: every policy, several prompt sets, batch sizes, confidence intervals, plots.
"""

import sys
import time

from d2sd import LLM, SamplingParams

PROMPTS = [
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 60 km in 45 minutes. What is its speed in km/h?",
]
conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
sampling = SamplingParams(temperature=0.0, max_tokens=48)

expected = None
for policy in ("off", "chain", "d2sd", "hybrid"):
    with LLM(sys.argv[1], policy=policy) as llm:
        start = time.perf_counter()
        answers = [answer.token_ids for answer in llm.chat(conversations, sampling)]
        seconds = time.perf_counter() - start
        expected = expected or answers
        tokens = sum(map(len, answers))
        print(
            f"{policy:8}{llm.stats.tau:6.2f} tokens per step{tokens / seconds:8.1f} tokens per second"
            f"   {'same tokens' if answers == expected else 'OTHER TOKENS'} as plain decoding"
        )
