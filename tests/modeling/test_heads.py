"""Heads against scores computed token by token, pair by pair, and what policies are given of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.head_configs import HeadConfig, InjectionConfig, MarkovConfig, PairConfig
from d2sd.modeling.drafters.pair import PairHead
from d2sd.plugins.choice import candidates
from d2sd.plugins.choice.reference import gumbel
from d2sd.plugins.trees import Draft
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from tests.tiny import HEADS, tiny_decoder, tiny_drafter

# Shape letters: K blocks, G block size, S slots, V vocabulary.

DECODER = tiny_decoder()
TARGET = DECODER.config
MASK, VOCABULARY, BLOCK = 63, 64, 5
#: δ(p, c) of all c behind p, of the slot whose hidden state is h; tensors by their names in checkpoints.
Pair = Callable[[dict[str, Tensor], Tensor, int], list[float]]


def product(rows: Tensor, column: list[float]) -> list[float]:
    return [sum(float(x) * y for x, y in zip(row, column, strict=True)) for row in rows.tolist()]


def vanilla(tensors: dict[str, Tensor], h: Tensor, p: int) -> list[float]:
    return product(tensors["markov_head.markov_w2.weight"], tensors["markov_head.markov_w1.weight"][p].tolist())


def gated(tensors: dict[str, Tensor], h: Tensor, p: int) -> list[float]:
    of_parent = tensors["markov_head.markov_w1.weight"][p].tolist()
    logits = product(tensors["markov_head.gate_proj.weight"], [*h.tolist(), *of_parent])
    bias = tensors["markov_head.gate_proj.bias"].tolist()
    open_ = [1 / (1 + math.exp(-x - b)) for x, b in zip(logits, bias, strict=True)]
    return product(tensors["markov_head.markov_w2.weight"], [g * x for g, x in zip(open_, of_parent, strict=True)])


def selected(tensors: dict[str, Tensor], h: Tensor, p: int) -> list[float]:
    of_slot = product(tensors["candidate_selector.hidden_projection.weight"], h.tolist())
    of_parent = tensors["candidate_selector.predecessor_codebook"][p].tolist()
    both = [g * x for g, x in zip(of_slot, of_parent, strict=True)]
    return product(tensors["candidate_selector.successor_codebook"], both)


def paired(tensors: dict[str, Tensor], h: Tensor, p: int) -> list[float]:
    a, b, g = (
        tensors[f"pair_head.{name}"].tolist()
        for name in ("predecessor_projection", "successor_projection", "hidden_projection.weight")
    )
    rank = len(a)

    def unit(token: int) -> list[float]:
        row: list[float] = DECODER.embedding[token].tolist()
        rms = math.sqrt(sum(x * x for x in row) / len(row))
        return [x / rms for x in row]

    def along(matrix: list[list[float]], r: int, vector: list[float]) -> float:
        return sum(x * y for x, y in zip(matrix[r], vector, strict=True))

    of_parent, hidden = unit(p), h.tolist()
    both = [along(a, r, of_parent) * along(g, r, hidden) for r in range(rank)]
    return [sum(x * along(b, r, unit(c)) for r, x in enumerate(both)) / math.sqrt(rank) for c in range(VOCABULARY)]


def told(tensors: dict[str, Tensor], h: Tensor, p: int) -> list[float]:
    """The score of c behind p less that of the slot alone; h has what is normed, and the row before the injection."""
    w = {name.removeprefix("injection."): tensor.tolist() for name, tensor in tensors.items() if "injection" in name}
    numbers, eps = h.tolist(), TARGET.body.rms_norm_eps
    normed, x = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]

    def along(matrix: list[list[float]], vector: list[float]) -> list[float]:
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    def length(vector: list[float]) -> float:
        return math.sqrt(sum(number * number for number in vector))

    last = sum(name.startswith("readouts") for name in w) - 1
    readout = along(w[f"readouts.{last}.weight"], x)
    rank = len(readout)
    own = [math.sqrt(rank) * number / length(readout) for number in readout]
    code = [math.sqrt(rank) * number for number in w["transfer_codes"][p]]
    of_slot, of_parent = along(w["receiver_gate.weight"], own), along(w["predecessor_gate.weight"], code)
    gates = zip(of_slot, of_parent, w["bias"], strict=True)
    opened = [1 / (1 + math.exp(-a - b - c)) for a, b, c in gates]
    message = [gate * number for gate, number in zip(opened, along(w["message.weight"], code), strict=True)]
    size = length(x) / math.sqrt(len(x))
    behind = [a + size * b for a, b in zip(x, along(w[f"writes.{last}.weight"], message), strict=True)]
    rms = math.sqrt(length(behind) ** 2 / len(behind) + eps)
    norm = tensors["norm.weight"].tolist()
    more = [a / rms * b - c for a, b, c in zip(behind, norm, normed, strict=True)]
    return along(DECODER.head.tolist(), more)


PAIRS: dict[str, Pair] = {
    "markov": vanilla, "gated markov": gated, "selector": selected, "injection": told, "pair": paired,
}  # fmt: skip


def headed(head: HeadConfig) -> Drafter:
    drafter = tiny_drafter(TARGET, block_size=BLOCK, head=head)
    drafter.join(DECODER)
    return drafter


def width_of(head: HeadConfig) -> int:
    """Numbers of a slot's hidden state."""
    return TARGET.body.hidden_size * (1 + isinstance(head, InjectionConfig))


def passed(seed: int, shown: list[list[int]], head: HeadConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [1, K, S, V] and hidden states [1, K, S, ..] of blocks [1, K, G] that begin with these tokens."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.tensor([[*tokens, *[MASK] * (BLOCK - len(tokens))] for tokens in shown])[None]
    logits = 2 * torch.randn(*blocks.shape[:2], BLOCK - 1, VOCABULARY, generator=generator)
    return logits, torch.randn(*logits.shape[:3], width_of(head), generator=generator), blocks


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("pool", [6, VOCABULARY])
def test_scores_equal_those_of_each_pair(name: str, temperature: float, pool: int) -> None:
    """Behind an anchor, and behind a prefix; the walk, each slot's best behind the best before, comes first."""
    config, pair = HEADS[name], PAIRS[name]
    drafter = headed(config)
    tensors, context = drafter.state_dict(), 11
    logits, hidden, blocks = passed(3, [[7], [7, 20, 41]], config)
    params = SamplingParams(temperature=temperature, seed=5)
    sampling = Sampling.of([params], VOCABULARY, "cpu")
    width = min(pool, 4)
    draft = candidates(logits, torch.tensor([context]), sampling, pool)
    found = drafter.conditioned(draft, hidden, blocks, sampling.temperature, width)
    assert found.behind is not None
    assert found.tokens.shape == (1, 2, BLOCK - 1, width)
    assert found.behind.shape == (1, 2, BLOCK - 1, 1 + width, width)
    noise = gumbel(torch.tensor([5]), torch.arange(BLOCK - 1)[None] + context + 1, VOCABULARY)[0]

    for k in range(2):
        walked = None
        for s in range(BLOCK - 1):
            u, h, known = logits[0, k, s].double(), hidden[0, k, s], int(blocks[0, k, s])
            if temperature:
                u = u / temperature + noise[s].double()
                top = logits[0, k, s].topk(min(64, VOCABULARY)).indices
                total = float(u[top].logsumexp(0))
            else:
                total = float(u.logsumexp(0))
            among = sorted(range(VOCABULARY), key=lambda token: -float(u[token]))[:pool]
            scale = temperature or 1.0

            def behind(parent: int | None) -> dict[int, float]:
                """Log-probabilities of the candidates behind a token, or behind one that is not known."""
                said = {c: float(u[c]) - total for c in among}  # noqa: B023
                rest = max(1.0 - sum(math.exp(p) for p in said.values()), 1e-6)
                if parent is not None:
                    added = pair(tensors, h, parent)  # noqa: B023
                    said = {c: p + added[c] / scale for c, p in said.items()}  # noqa: B023
                whole = rest + sum(math.exp(p) for p in said.values())
                return {c: p - math.log(whole) for c, p in said.items()}

            parents = [None if known == MASK else known, *found.tokens[0, k, s - 1].tolist()]
            own = found.tokens[0, k, s].tolist()
            for row, parent in enumerate(parents):
                wanted = behind(parent if known == MASK else known)
                torch.testing.assert_close(
                    found.behind[0, k, s, row].double(),
                    torch.tensor([wanted[c] for c in own]).double(),
                    atol=2e-5,
                    rtol=0,
                )
            walk = behind(walked if known == MASK else known)
            best = sorted(walk, key=lambda c: -walk[c])
            assert own == best[:width]
            torch.testing.assert_close(
                found.logprob[0, k, s].double(), torch.tensor([walk[c] for c in own]).double(), atol=2e-5, rtol=0
            )
            walked = best[0]


@pytest.mark.parametrize("name", HEADS)
def test_chains_are_given_the_walk(name: str) -> None:
    """One candidate of a slot, or many: the same chain, which the best of each slot alone would not be."""
    drafter = headed(HEADS[name])
    logits, hidden, blocks = passed(4, [[7], [9, 2]], HEADS[name])
    sampling = Sampling.of([SamplingParams()], VOCABULARY, "cpu")
    draft = candidates(logits / 8, torch.tensor([3]), sampling, drafter.pool)
    one, many = (drafter.conditioned(draft, hidden, blocks, sampling.temperature, width) for width in (1, 8))
    assert one.behind is None
    assert torch.equal(one.top1, many.top1)
    assert torch.equal(one.confidence, many.confidence)
    assert not torch.equal(one.top1, draft.top1)


#: What is zero where a head adds nothing.
ZEROS = {MarkovConfig(rank=4): "markov_head.markov_w2.weight", PairConfig(rank=4): "pair_head.successor_projection"}


@pytest.mark.parametrize("config", ZEROS, ids=lambda config: config.name)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 4, 16])
def test_a_head_of_zeros_changes_nothing(config: HeadConfig, temperature: float, width: int) -> None:
    """To the bit, where equal candidates and slots without proposals stand too."""
    drafter = headed(config)
    drafter.get_parameter(ZEROS[config]).zero_()
    drafter.join(DECODER)
    logits, hidden, blocks = passed(5, [[7], [9, 2]], config)
    logits[:, :, 1] = logits[:, :, 1].round()
    logits[:, 1, 2, 5] = 1e4
    sampling = Sampling.of([SamplingParams(temperature=temperature, seed=3)], VOCABULARY, "cpu")
    draft = candidates(logits, torch.tensor([3]), sampling, 16)
    draft.logprob[:, 0, 3, 9:] = -torch.inf
    found = drafter.conditioned(draft, hidden, blocks, sampling.temperature, width)
    assert torch.equal(found.tokens, draft.tokens[..., :width])
    assert torch.equal(found.logprob, draft.logprob[..., :width])
    if width > 1:
        assert found.behind is not None
        assert torch.equal(found.behind, found.logprob[..., None, :].expand_as(found.behind))


def test_no_child_is_likelier_than_certain_and_nothing_is_nan() -> None:
    """Whatever a broken head says, and where a slot proposes nothing."""
    drafter = headed(MarkovConfig(rank=4))
    w1 = drafter.get_parameter("markov_head.markov_w1.weight")
    w1[:20] *= 1e30
    w1[20:30], w1[30:40] = torch.inf, torch.nan
    logits, hidden, blocks = passed(6, [[7], [25], [35], [60]], MarkovConfig(rank=4))
    sampling = Sampling.of([SamplingParams()], VOCABULARY, "cpu")
    draft = candidates(logits, torch.tensor([3]), sampling, 16)
    nothing = draft.logprob.clone()
    nothing[:, 3, 1], nothing[:, 3, 2, 3:] = -torch.inf, -torch.inf
    found = drafter.conditioned(Draft(draft.tokens, nothing), hidden, blocks, sampling.temperature, 8)
    assert found.behind is not None
    for numbers in (found.logprob, found.behind):
        assert not numbers.isnan().any()
        assert (numbers <= 0).all()
    assert (found.logprob[:, 3, 1] == -torch.inf).all()


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that are kernels on a GPU: all but views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {part.untyped_storage().data_ptr() for part in args if isinstance(part, Tensor)}
        self.count += not (isinstance(out, Tensor) and out.untyped_storage().data_ptr() in inputs)
        return out


def test_what_a_pair_head_costs() -> None:
    """Numbers of a head at SmolLM2's hidden size, and operators of a pass, however many branches it has."""
    head = PairHead(PairConfig(128), 576)
    assert sum(parameter.numel() for parameter in head.parameters()) == 221_184
    drafter = tiny_drafter(TARGET, block_size=8, head=PairConfig(rank=4))
    drafter.join(DECODER)
    counts = set()
    for branches in (1, 4):
        tokens = torch.arange(16).expand(1, branches, 7, -1)
        logprob = torch.linspace(-2, -9, 16).expand(1, branches, 7, -1)
        hidden, blocks = torch.randn(1, branches, 7, 32), torch.full((1, branches, 8), MASK)
        with Launches() as launches, torch.inference_mode():
            drafter.conditioned(Draft(tokens, logprob), hidden, blocks, torch.zeros(1), 16)
        counts.add(launches.count)
    assert len(counts) == 1
    assert max(counts) <= 48


#: Launches for what a head makes of hidden states: a product, or the gate of each parent.
BEFORE_SCORES = {"markov": 0, "gated markov": 7, "selector": 1, "injection": 28, "pair": 1}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("width", [1, 16])
def test_a_pass_on_a_gpu_scores_in_one_launch(name: str, width: int) -> None:
    """However many requests and branches it has; a hidden state that is a product's input is not copied."""
    pytest.importorskip("triton", reason="the extra triton is not installed")
    from benchmarks.gpu.traffic import Meter, without_gpu

    drafter = headed(HEADS[name]).to("meta")
    drafter.join(deepcopy(DECODER).to("meta"))
    for batch, branches in ((1, 1), (3, 4)):
        shape = batch, branches, BLOCK - 1
        tokens, logprob, hidden, blocks, temperature = (
            torch.empty(*size, dtype=kind, device="meta")
            for size, kind in (
                ((*shape, 16), torch.long),
                ((*shape, 16), torch.float32),
                ((*shape, width_of(HEADS[name])), torch.float32),
                ((batch, branches, BLOCK), torch.long),
                ((batch,), torch.float32),
            )
        )
        meter = Meter(context=0, vocabularies=())
        with without_gpu(meter), meter, torch.inference_mode():
            found = drafter.conditioned(Draft(tokens, logprob), hidden, blocks, temperature, width)
        names = [launch.name for launch in meter.launches]
        assert names[-1] == "pairs_kernel"
        assert len(names) == BEFORE_SCORES[name] + 1, names
        assert found.tokens.shape == (*shape, width)
        assert (found.behind is None) == (width == 1)


def test_config_says_what_it_is() -> None:
    assert str(headed(MarkovConfig(rank=4)).config).endswith(", dspark head")
    assert str(tiny_drafter(TARGET).config).endswith(", reads target layers 0, 1")
