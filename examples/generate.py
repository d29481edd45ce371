"""Generate text from a bundle: python examples/generate.py bundles/smollm2-135m"""

import sys

from d2sd import LLM, SamplingParams

with LLM(sys.argv[1]) as llm:
    for answer in llm.generate(["The capital of France is", "def fibonacci(n):"], SamplingParams(max_tokens=32)):
        print(answer.text, f"\n[{answer.finish_reason}, {answer.stats.tau:.2f} tokens per step]\n")
