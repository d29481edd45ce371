"""All mutants. H1 and the like are names in the review of the code for GPUs that asked for them."""

from __future__ import annotations

from tests.mutants import attention, choice, graphs, launches, layers, trees

MUTANTS = [*graphs.MUTANTS, *launches.MUTANTS, *attention.MUTANTS, *layers.MUTANTS, *choice.MUTANTS, *trees.MUTANTS]
