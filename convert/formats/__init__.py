"""Drafter checkpoints: any format in, one canonical drafter between, any format out.

read.py ──> CanonicalDrafter ──> write.py        convert.py: both, and the output folder appears complete
detect.py                          which format a config.json is
speculators.py, vocabulary.py      speculators' format: nested body, hidden-state numbers, draft vocabulary in tensors
shared_tensors.py                  the target's embedding and head, which some formats copy

Below, in checkpoint/: dflash.py, the layout of z-lab, ModelOpt and SpecForge, in which bundles hold their drafters;
unsupported.py, what is recognised and refused; layer_ids.py, what a layer id means in each format.
"""
