"""All mutants. H1 and the like are names in the review of the code for GPUs that asked for them."""

from __future__ import annotations

from tools.mutants import attention, choice, delta_rule, gated_layers, graphs, launches, layers, pair_scores, trees

PARTS = (graphs, launches, attention, layers, choice, trees, pair_scores, delta_rule, gated_layers)
MUTANTS = [mutant for part in PARTS for mutant in part.MUTANTS]
