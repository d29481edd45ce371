"""Answer prompts that come at one time, in one batch: python examples/many_at_once.py bundles/smollm2-135m"""

import asyncio
import sys

from d2sd import AsyncLLM, D2SDError, SamplingParams

if len(sys.argv) != 2:
    sys.exit(__doc__)
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "Water boils at"]


async def answer(llm: AsyncLLM, prompt: str) -> None:
    """Print each answer when it is ready, as a web service would send it."""
    try:
        (completion,) = await llm.generate(prompt, SamplingParams(max_tokens=32), deadline=60)
        print(f"{prompt!r}: {completion.text!r} [{completion.stats.tau:.2f} tokens per step]")
    except D2SDError as error:  # of this prompt alone
        print(f"{prompt!r}: {error.what}")


async def main() -> None:
    """Open the bundle, and have all prompts answered at once.

    The policy is chosen to show speculation. Where it does not pay, as for four requests on most CPUs, the default
    `auto` decodes plainly, one token a step, and is faster.
    """
    async with AsyncLLM(sys.argv[1], policy="hybrid") as llm:
        await asyncio.gather(*(answer(llm, prompt) for prompt in PROMPTS))


asyncio.run(main())
