"""Chat with a bundle, streaming: python examples/chat_stream.py bundles/smollm2-135m (Ctrl-D ends it)"""

import sys
from contextlib import suppress

from d2sd import LLM, SamplingParams

if len(sys.argv) != 2:
    sys.exit(__doc__)
messages = [{"role": "system", "content": "You are a helpful assistant."}]
with LLM(sys.argv[1]) as llm, suppress(EOFError):
    while question := input("> "):
        messages.append({"role": "user", "content": question})
        answer = ""
        for text in llm.stream(messages, SamplingParams(temperature=0.7, seed=1, max_tokens=128)):
            print(text, end="", flush=True)
            answer += text
        print()
        messages.append({"role": "assistant", "content": answer})
