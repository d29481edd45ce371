"""Drafter checkpoints: any format in, one canonical drafter between, any format out.

read.py ──> CanonicalDrafter ──> write.py        convert.py: both, and the folder appears whole
detect.py, foreign.py     which format a config.json is, and what is recognised and refused
layout.py                 the DFlash layout, of which z-lab, ModelOpt and SpecForge write dialects
speculators.py            the other one: nested body, hidden-state numbers, a draft vocabulary in tensors
layer_ids.py, vocabulary.py, borrowed.py         conventions, each applied in one place
"""
