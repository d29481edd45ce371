"""d2sd's tree inside TensorRT-LLM's PyTorch flow. NOT YET RUN with an installed TensorRT-LLM or on a GPU.

TensorRT-LLM serves trees in one mode that takes other drafters: Eagle3 with dynamic trees. It captures hidden states of
any layers, verifies a tree of a fixed number of nodes from the slot storage, accepts greedily or by rejection sampling,
moves K/V, batches in flight and captures graphs. d2sd overrides drafting: two hooks of its worker, and its draft model.

    contract.py         what is used of TensorRT-LLM, and whether the installed version has it
    register.py         patches, or raises with the reasons; refuses targets and arguments by name
    tree_drafters.py    the drafters over pages that a slot owns: `draft_trees` of d2sd's own runtime
    tree_slots.py       a tree into the slot storage
    tree_worker.py      the two hooks

Text does not depend on drafts: attention and acceptance read one slot's row, which is written from one tree.
"""
