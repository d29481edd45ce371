"""Every metric of the report as a pure function of cells. The docstrings are printed under the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from d2sd.bench.result import Cell


def mean_tau(cells: Sequence[Cell]) -> float:
    """Mean over sets of each set's τ: every set has equal weight."""
    return sum(cell.tau for cell in cells) / len(cells)


def tau_by_token(cell: Cell) -> float:
    """All committed tokens over all request-steps: long responses have more weight than in τ."""
    return cell.total.tau


def request_steps(cell: Cell) -> int:
    """Decode steps summed over requests: a step that serves three requests counts three times."""
    return cell.total.steps


def traced_steps(cell: Cell) -> int:
    """Request-steps of the run that was traced: the timed one, where that does not change what is served."""
    return cell.traced_steps or request_steps(cell)


def committed(cell: Cell) -> int:
    """Tokens committed by all steps, including those past a stop token or the length limit."""
    return cell.total.tokens


def rows_per_step(cell: Cell) -> float:
    """Rows verified by the target per request-step, padding included."""
    return cell.verified_rows / request_steps(cell)


def rows_per_token(cell: Cell) -> float:
    """Rows verified by the target per committed token: the work for a token."""
    return cell.verified_rows / committed(cell)


def mean_nodes(cell: Cell) -> float:
    """Valid tree nodes per request-step, the anchor included."""
    return cell.nodes / traced_steps(cell)


def merged_per_step(cell: Cell) -> float:
    """Drafted tokens per request-step merged into an existing node, which cost no row of their own."""
    return cell.merged / traced_steps(cell)


def rescued_share(cell: Cell) -> float:
    """Share of request-steps in which nodes of the second pass extended acceptance beyond the first draft's chain."""
    return cell.rescued / traced_steps(cell)


def served(cell: Cell) -> dict[str, float]:
    """Share of request-steps by the policy that `auto` selected."""
    counted = sum(cell.policies.values())
    return {policy: count / counted for policy, count in sorted(cell.policies.items()) if counted}


def boundary_ranks(cell: Cell) -> dict[str, float]:
    """Share of request-steps by the rank, among the K branches, of the position where the target rejected the first
    draft; "none" if no branch restarts there. Rank 0 has the highest predicted probability.
    """
    counted = sum(cell.boundary_rank.values())
    ranks = sorted(cell.boundary_rank, key=lambda rank: (rank == "none", len(rank), rank))
    return {rank: cell.boundary_rank[rank] / counted for rank in ranks if counted}


def step_seconds(cell: Cell) -> float:
    """Mean time of an engine step in seconds, without prefill."""
    return sum(spent for stage, spent in cell.stage_seconds.items() if stage != "prefill") / cell.steps


def cycle_cost(cell: Cell, plain: Cell | None) -> float | None:
    """Mean time of an engine step, without prefill, over that of plain decoding on the same sets, at the same
    temperature and concurrency.
    """
    unit = _unit(step_seconds, cell, plain)
    return step_seconds(cell) / unit if unit else None


def tokens_per_second(cell: Cell) -> float:
    """Response tokens of all requests over the wall time of the whole cell, prefill included."""
    return sum(response.tokens for response in cell.requests) / cell.wall_seconds


def speedup(cell: Cell, plain: Cell | None) -> float | None:
    """Tokens per second over those of plain decoding on the same sets, at the same temperature and concurrency."""
    unit = _unit(tokens_per_second, cell, plain)
    return tokens_per_second(cell) / unit if unit else None


def _unit(metric: Callable[[Cell], float], cell: Cell, plain: Cell | None) -> float:
    """The figure of plain decoding; 0 if it was not measured."""
    if plain is None:
        return 0.0
    assert (cell.set, cell.temperature, cell.concurrency) == (plain.set, plain.temperature, plain.concurrency)
    return metric(plain)
