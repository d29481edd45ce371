"""Drafter checkpoints: every format is read into one canonical drafter, and written from it.

read.py ──> CanonicalDrafter ──> write.py        convert.py: both; the output appears complete or not at all
detect.py                          the format of a config.json
speculators.py, vocabulary.py      speculators' format: nested body, hidden-state layer ids, draft vocabulary in tensors
shared_tensors.py                  copies of the target's embedding and head

Below, in checkpoint/: dflash.py, the layout of z-lab, ModelOpt and SpecForge, in which bundles store drafters;
unsupported.py, models that are recognised and refused; layer_ids.py, what a layer id means in each format.
"""
