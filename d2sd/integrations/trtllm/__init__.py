"""Two drafters inside TensorRT-LLM's PyTorch flow. NOT YET RUN: nobody here had TensorRT-LLM, or a GPU for it.

What is registered: DFlash mode with both drafters, verified as one chain by TensorRT-LLM's own acceptance. Where the
first draft is likeliest to be rejected, the second drafter drafts again behind the prefix that is kept. Whatever is
proposed, TensorRT-LLM commits the target's tokens only, and no K/V of the target is touched here.

What is not: D²SD's tree. There a DFlash step is max_draft_len + 1 tokens in a row, for its argument class, its sampler
and its K/V rewind alike; trees exist for Eagle3 and MTP alone, whose K/V is compacted after acceptance. Replacing all
of that from outside, unrun, could serve wrong text. Trees run on d2sd's own runtime.

`contract.py` lists what is used of TensorRT-LLM and where it was read, `probe.py` holds the installed version against
it, `register.py` decides and `loud.py` says so, `drafters.py`, `worker.py` and `chain.py` do the work.
"""
