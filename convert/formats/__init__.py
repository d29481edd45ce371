"""Drafter checkpoints: every format is read into one canonical drafter, and written from it.

read.py ──> CanonicalDrafter ──> convert.py      which reads and writes; the output appears complete or not at all
speculators.py                     speculators' format: nested body, hidden-state layer ids, draft vocabulary in tensors
shared_tensors.py                  copies of the target's embedding and head

Below, in checkpoint/: dflash.py, the layout of z-lab, ModelOpt and SpecForge, in which bundles store drafters;
unsupported.py, models that are recognised and refused; layout.py, what layouts share.
"""
