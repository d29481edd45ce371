"""All mutants."""

from __future__ import annotations

from tests.mutants import graphs

MUTANTS = [*graphs.MUTANTS]
