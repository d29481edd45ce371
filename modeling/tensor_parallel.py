"""Tensor parallelism: the target cut into parts, one a rank, and what the ranks exchange. Drafters stay whole.

    q, k, v, gate, up      rows of the weight, which are outputs     nothing
    attention              the rank's heads over its own K/V pages   nothing
    o, down                columns of the weight, which are inputs   an all-reduce each
    head                   rows of the weight, which are tokens      logits, gathered by every rank
    embedding, norms       whole on every rank                       nothing

The cut is Megatron-LM's (arXiv 1909.08053). A table lookup in parts would need an all-reduce for every pass, the
drafters' too; a tied head is the rank's rows of the whole table. Sums and logits have the same bits on every rank
afterwards, so all ranks draft, build and accept the same trees, and none of that is exchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from d2sd.errors import D2SDError
from d2sd.modeling.experts import Experts
from d2sd.modeling.quantized import QuantizedLinear
from d2sd.modeling.shard import Cut, Shard, check_divisible

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from d2sd.modeling.decoder import Decoder
    from d2sd.modeling.layers import Layer

# Shape letters: R rows, E hidden, V vocabulary, W rows of the head of one rank.


class PeerLost(Exception):
    """A collective failed: another rank has ended, or the connection to it."""


def cut(model: Decoder, shard: Shard) -> dict[str, Cut]:
    """Make a target, on the meta device or loaded, this part of itself; returns the parts by the names of tensors.

    Raises D2SDError for a tensor that cannot be divided, such as a quantized one whose blocks reach over the border.
    """
    check_divisible(model.config, shard.size)
    config, body, cuts = model.config, model.config.body, dict[str, Cut]()
    heads, kv_heads, columns = body.num_heads, body.num_kv_heads, body.intermediate_size
    axes = {  # module of a layer: axis of its tensors, and units along it
        "self_attn.q_proj": (0, heads),
        "self_attn.k_proj": (0, kv_heads),
        "self_attn.v_proj": (0, kv_heads),
        "self_attn.o_proj": (1, heads),
    }
    mlp = {"mlp.gate_proj": (0, columns), "mlp.up_proj": (0, columns), "mlp.down_proj": (1, columns)}
    for index, layer in enumerate(cast("Iterable[Layer]", model.layers)):
        if isinstance(layer.mlp, Experts):
            _cut_experts(layer.mlp, shard)
        for name, (axis, units) in (axes if isinstance(layer.mlp, Experts) else axes | mlp).items():
            module = layer.get_submodule(name)
            cuts |= _cut_module(module, f"layers.{index}.{name}", axis, units, shard)
        sinks = layer.get_submodule("self_attn")
        if getattr(sinks, "sinks", None) is not None:
            cuts |= _cut_tensor(sinks, f"layers.{index}.self_attn", "sinks", Cut(0, *shard.part(heads)))
    model.vocab_rows = slice(*shard.rows_of_head(config.vocab_size))
    if not config.tie_word_embeddings:
        cuts |= _cut_tensor(model.lm_head, "lm_head", "weight", Cut(0, model.vocab_rows.start, model.vocab_rows.stop))
    model.config = replace(config, body=shard.body(body))
    return cuts


def _cut_experts(experts: Experts, shard: Shard) -> None:
    """Cut every expert as an MLP is cut; the router stays. A checkpoint's parts are `ExpertMap.cuts`."""
    inner = experts.config.intermediate_size
    first, last = shard.part(inner)
    experts.config = replace(experts.config, intermediate_size=last - first)
    for name in ("gate_up", "gate_up_bias"):
        if (joint := getattr(experts, name)) is not None:  # all gates, then all ups
            part = torch.cat([joint[:, first:last], joint[:, inner + first : inner + last]], 1)
            setattr(experts, name, nn.Parameter(part.detach(), requires_grad=False))
    experts.down = nn.Parameter(experts.down[..., first:last].detach().clone(), requires_grad=False)


def _cut_module(module: nn.Module, path: str, axis: int, units: int, shard: Shard) -> dict[str, Cut]:
    """Cut the tensors of a linear layer: what it has for each output or input, and not what holds for all of them."""
    cuts: dict[str, Cut] = {}
    first, last = shard.part(units)
    if isinstance(module, nn.Linear | QuantizedLinear):
        _narrow(module, path, axis, Fraction(first, units), Fraction(last, units))
    for name, tensor in module.state_dict().items():
        if tensor.dim() <= axis or tensor.shape[axis] == 1:  # one scale for all, or a bias of whole sums
            continue
        size = tensor.shape[axis]
        start, stop = size * first // units, size * last // units
        if size * first % units or size * last % units:
            raise D2SDError(
                "A tensor cannot be divided among the ranks.",
                where=f"{path}.{name}",
                found=f"{list(tensor.shape)} for {shard.size} ranks",
                expected=f"axis {axis} divides at {first} of {units}",
            )
        cuts |= _cut_tensor(module, path, name, Cut(axis, start, stop))
    return cuts


def _narrow(module: nn.Linear | QuantizedLinear, path: str, axis: int, start: Fraction, stop: Fraction) -> None:
    """Set the sizes of a layer that is cut; a block or a group of a quantized one has to be whole."""
    name = ("out_features", "in_features")[axis]
    whole: int = getattr(module, name)
    step = module.steps[axis] if isinstance(module, QuantizedLinear) else 1
    if whole * start % step or (stop < 1 and whole * stop % step):
        raise D2SDError(
            "A quantized layer cannot be divided among the ranks.",
            where=path,
            found=f"{whole} {('outputs', 'inputs')[axis]}",
            expected=f"a part of {step}, or a multiple",
            fix="choose fewer ranks, or build with target.dequantize",
        )
    setattr(module, name, int(whole * stop) - int(whole * start))


def _cut_tensor(module: nn.Module, path: str, name: str, part: Cut) -> dict[str, Cut]:
    tensor = part.read(cast("Tensor", getattr(module, name))).detach().clone()
    is_parameter = name in dict(module.named_parameters(recurse=False))
    setattr(module, name, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
    return {f"{path}.{name}": part}


class Group:
    """The ranks that share a target, of which this process is one. Counts the bytes of what they exchange."""

    def __init__(self, shard: Shard, data: ProcessGroup, control: ProcessGroup | None = None) -> None:
        """`data` exchanges what the models compute; `control`, on the host, carries rank 0's messages."""
        self.shard, self.data, self.control = shard, data, control or data
        #: Bytes of results, by collective: `all_reduce`, `gather` and `broadcast`.
        self.bytes: Counter[str] = Counter()
        #: Finds the error to raise when a collective fails; None: `PeerLost`.
        self.blame: Callable[[], Exception] | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place; every rank has the same bits."""
        x = x.contiguous()
        self.bytes["all_reduce"] += x.nbytes
        self._wait(lambda: self.data.allreduce([x]))
        return x

    def gather(self, part: Tensor) -> Tensor:
        """Parts [..., W] of all ranks -> [..., size·W], in the order of the ranks."""
        rows = part.reshape(-1, part.shape[-1]).contiguous()  # [R, W]
        size = self.shard.size
        every = rows.new_empty(size * len(rows), rows.shape[1])
        self.bytes["gather"] += every.nbytes
        self._wait(lambda: self.data._allgather_base(every, rows))
        whole = every.view(size, *rows.shape).transpose(0, 1)
        return whole.reshape(*part.shape[:-1], -1)

    def broadcast(self, message: Tensor) -> Tensor:
        """Send a tensor on the host from rank 0 to the others, which receive it in theirs."""
        self.bytes["broadcast"] += message.nbytes
        self._wait(lambda: self.control.broadcast(message, 0))
        return message

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        own = torch.tensor([number])
        every = own.new_empty(self.shard.size)
        self._wait(lambda: self.control._allgather_base(every, own))
        return int(every.min())

    def abort(self) -> None:
        """End the collectives that a GPU still runs, with an error; from any thread."""
        self.data.abort()

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:  # of gloo and NCCL
            lost = PeerLost(str(error).splitlines()[0]) if self.blame is None else self.blame()
            raise lost from error


class SharedHead:
    """The exchange behind a vocabulary-parallel head."""

    def __init__(self, group: Group, vocab_size: int) -> None:
        self.group, self._vocab_size = group, vocab_size
        self._width = -(-vocab_size // group.shard.size)

    def logits(self, part: Tensor) -> Tensor:
        """The logits of the rank's rows of the head -> [..., V], the same on every rank."""
        if part.shape[-1] < self._width:
            part = nn.functional.pad(part, (0, self._width - part.shape[-1]))
        whole = self.group.gather(part)
        return whole if whole.shape[-1] == self._vocab_size else whole[..., : self._vocab_size].contiguous()

    def rows(self, weight: Tensor, ids: Tensor) -> Tensor:
        """Rows `ids` of the whole head [Vd, E]; `weight [W, E]` are the rank's. For a copy, when a model is loaded."""
        first, last = self.group.shard.rows_of_head(self._vocab_size)
        own = (ids >= first) & (ids < last)
        found = weight.new_zeros(len(ids), weight.shape[1])
        found[own] = weight[ids[own] - first]
        return self.group.all_reduce(found)


def connect(model: Decoder, group: Group) -> None:
    """Let a target that was `cut`, and loaded, exchange what its layers and its head compute."""
    for layer in cast("Iterable[Layer]", model.layers):
        layer.reduce = group.all_reduce
    if group.shard.rank > 0:
        drop_biases(model)
    model.shared_head = SharedHead(group, model.config.vocab_size)


def drop_biases(model: Decoder) -> None:
    """Set the biases behind sums to 0: rank 0 adds them."""
    for layer in cast("Iterable[Layer]", model.layers):
        mlp = layer.mlp
        down = mlp.down_bias if isinstance(mlp, Experts) else mlp.get_submodule("down_proj").bias
        for bias in (layer.self_attn.o_proj.bias, down):
            if isinstance(bias, Tensor):
                bias.data = torch.zeros_like(bias)
