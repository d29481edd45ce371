"""Chat with a bundle, streaming: python examples/chat_stream.py bundles/smollm2-135m (an empty line ends it)"""

import sys

from d2sd import LLM, SamplingParams

messages = [{"role": "system", "content": "You are a helpful assistant."}]
with LLM(sys.argv[1]) as llm:
    while question := input("> "):
        messages.append({"role": "user", "content": question})
        answer = ""
        for text in llm.stream(messages, SamplingParams(temperature=0.7, seed=1, max_tokens=128)):
            print(text, end="", flush=True)
            answer += text
        print()
        messages.append({"role": "assistant", "content": answer})
