"""The layers of a model on a CPU, for inference.

Where there is a C compiler they are one call of the compiled kernels (`d2sd.plugins.cpu`), otherwise PyTorch's
operators with packed products. FP8 weights are converted once to the type in which they are multiplied.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import accumulate
from threading import Lock
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.decoder import Decoder, TargetModel
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.feed_forward import FeedForward
from d2sd.modeling.fp8 import Fp8Linear, carried_product
from d2sd.modeling.inference import InferenceLayers, LayerOutputs
from d2sd.modeling.kv_pool import Chunks, KVPool, Rows, first_rows, windowed
from d2sd.modeling.layers import Layer, RMSNorm, Rotary
from d2sd.modeling.quantized import ComputedLinear, carrier
from d2sd.plugins.cascade_attention import ChunkMask
from d2sd.plugins.cpu import library
from d2sd.plugins.cpu.library import PANEL, address

logger = logging.getLogger(__name__)

# Shape letters: B requests, T rows, N rows of chunks, E hidden, L layers, Hkv K/V heads, D head size,
# n auxiliary layers.


def supported(body: BodyConfig, layers: Iterable[Layer], dtype: torch.dtype) -> bool:
    """Whether the kernels take layers of this geometry and type on this machine."""
    size = body.head_dim
    fits = size % library.HEAD_STEP == 0 and size <= library.LARGEST_HEAD
    runs = fits and not body.beyond_compiled and dtype in library.TYPES
    return runs and all(map(_is_plain, layers)) and library.available()


def _is_plain(layer: Layer) -> bool:
    """True if every projection is a plain nn.Linear (not FP8, not a ModelOpt wrapper) and no cache is quantized."""
    products = [part for group in layer.mlp.products() for part in group]
    parts = *(layer.get_submodule(f"self_attn.{part}_proj") for part in "qkvo"), *products
    plain = all(type(part) is nn.Linear for part in parts) and type(layer.self_attn.k_cache) is nn.Identity
    return plain and layer.reduce is None


class Order(NamedTuple):
    """The order of the rows of a pass, one request after the other."""

    starts: Tensor  # [B + 1] int64, of each request and behind the last; with rows that join [2·B + 1]
    longest: int  # most rows of a request
    kept: Tensor | None  # [N], their numbers among the B·T; None: all, as they come
    own: int = 0  # T of the pass, in front of those that join

    @classmethod
    def of(cls, needed: tuple[int, ...] | None, shape: Sequence[int], size: int = 0) -> Order:
        """The order of `needed` rows or all [B, T], and after all of them of the blocks of `size` that join."""
        batch, count = shape
        lengths = needed or (count,) * batch
        starts = torch.tensor([0, *accumulate((*lengths, *(size * length for length in lengths if size)))])
        if not size:
            return cls(starts, max(lengths), None if needed is None else first_rows(lengths, count))
        every = (1 + size) * count
        behind = first_rows([size * length for length in lengths], every) + count
        return cls(starts, every, torch.cat([first_rows(lengths, every), behind]), count)

    def spread(self, x: Tensor, axis: int, shape: Sequence[int]) -> Tensor:
        """x [..., N, ...] -> [..., B, T, ...]; rows that were not kept are undefined."""
        if self.kept is not None:
            size = *x.shape[:axis], shape[0] * shape[1], *x.shape[axis + 1 :]
            x = x.new_empty(size).index_copy_(axis, self.kept, x)
        return x.view(*x.shape[:axis], *shape, *x.shape[axis + 1 :])


class NativeLayers(InferenceLayers):
    """Copies of a model's layers and last norm, packed. They hold no parameters: they can only serve.

    Feed-forward networks without `products` are the model's own, packed; the library stops in front of each.
    """

    def __init__(
        self,
        body: BodyConfig,
        layers: Sequence[Layer],
        norm: RMSNorm,
        *,
        context: bool = False,
        target: NativeLayers | None = None,
    ) -> None:
        """`context`: for drafters, which make keys and values of a context too. `target`: its last layers lend MLPs."""
        super().__init__()
        self._config = body
        self._dtype = layers[0].self_attn.o_proj.weight.dtype
        self._kept: list[object] = [target]  # what the library points to
        mlps = [None] * len(layers) if target is None else list(target._layers)[-len(layers) :]
        self._views = {view: body.views.index(view) for view in body.views}  # of a pass, and a layer of each
        views = map([*self._views].index, body.views)
        self._between: dict[int, nn.Module]  # by the layer
        if target is None:
            others = {index: layer for index, layer in enumerate(layers) if not layer.mlp.products()}
            self._between = {index: layer.packed_feed_forward(packed_product) for index, layer in others.items()}
        else:
            first = len(target._layers) - len(layers)
            self._between = {index - first: made for index, made in target._between.items() if index >= first}
        made = map(self._packed, layers, views, mlps)
        self._layers: ctypes.Array[library.Layer] = (library.Layer * len(layers))(*made)
        self._norm = self._wide(norm.scale)
        self._local_rotary = None if body.local_rope is None else Rotary(body.local_rope, body.head_dim)
        self._body = self._described()
        self._memory, self._lock = library.Memory(), Lock()  # one pass at a time works in the memory
        weakref.finalize(self, _free, self._memory)  # before the interpreter takes ctypes apart
        self._context = _context(layers) if context else None

    def _described(self) -> library.Body:
        body = self._config
        return library.Body(
            len(self._layers),
            body.hidden_size,
            body.intermediate_size,
            body.num_heads,
            body.num_kv_heads,
            body.head_dim,
            library.TYPES[self._dtype],
            self._norm,
            self._layers,
            body.rms_norm_eps,
        )

    def _packed(self, layer: Layer, view: int, mlp: library.Layer | None) -> library.Layer:
        attention = layer.self_attn
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        q_rows = _padded(q.weight)
        weight = torch.cat([q_rows, k.weight, v.weight])
        bias = None if q.bias is None else torch.cat([_padded(q.bias), k.bias, v.bias])
        norms = layer.input_layernorm, layer.feed_forward_norm, attention.q_norm, attention.k_norm, layer.branch_norm
        scales = [norm.scale if isinstance(norm, RMSNorm) else None for norm in norms]
        if scales[2] is not None:  # a rotation keeps it
            scales[2] = scales[2] * attention.query_scale
        products = [
            library.PackedLinear.of(weight, bias),
            library.PackedLinear.of(attention.o_proj.weight, attention.o_proj.bias),
        ]
        if mlp is None and (groups := layer.mlp.products()):
            width = self._config.hidden_size
            parts, (down_proj,) = cast("tuple[tuple[nn.Linear, ...], ...]", groups)
            gate, up = (_padded(part.weight).view(-1, PANEL, width) for part in parts)
            products.append(library.PackedLinear.of(torch.stack([gate, up], 1).flatten(0, 2)))
            products.append(library.PackedLinear.of(down_proj.weight))
        self._kept.extend(products)
        return library.Layer(
            *(None if scale is None else self._wide(scale) for scale in scales),
            None if attention.sinks is None else self._wide(attention.sinks),
            view,
            *(product.struct for product in products),
            *(() if mlp is None else (mlp.gate_up, mlp.down)),
        )

    def _wide(self, weight: Tensor) -> int | None:
        wide = weight.detach().float().contiguous()
        self._kept.append(wide)
        return address(wide)

    def forward(
        self, x: Tensor, rotary: Rotary, rows: Rows | Chunks, pool: KVPool, aux_layer_ids: tuple[int, ...] = ()
    ) -> LayerOutputs:
        """x [B, T, E], of chunks [1, N, E] -> the fields of `DecoderOutput`."""
        shape, joining, end, joined = x.shape[:2], rows.joining, len(self._layers), None
        assert rows.positions.shape == shape
        if isinstance(rows, Chunks):
            order = Order(rows.attn_mask.starts, max(rows.attn_mask.lengths), None)
        else:
            assert rows.attn_mask.shape == (*shape, shape[1])
            order = Order.of(rows.needed, shape)
        flat = _flat(x.to(torch.float32, copy=True), order.kept).contiguous()  # becomes the last output
        split, count = end if joining is None else end - joining.layers, len(flat)
        out, features, k, v = self._through(range(split), flat, order, rotary, rows, pool, aux_layer_ids)
        if joining is not None:
            assert not aux_layer_ids, "features are of passes that none join"
            flat, both = torch.cat([flat, joining.x.float().expand(joining.size * count, -1)]), joining.beside(rows)
            given = Order.of(both.needed, shape, joining.size), rotary, both, pool, ()
            every, _, *own = self._through(range(split, end), flat, *given, joining.compiled(NativeLayers))
            k, v = (torch.cat([first, rest[:, :count]]) for first, rest in zip((k, v), own, strict=True))
            out, joined = every[:count], order.spread(every[count:].view(count, joining.size, -1), 0, shape)
        hidden, features = (order.spread(part, 0, shape) for part in (out, features))
        k, v = (order.spread(part, 1, shape) for part in (k, v))
        return hidden, features, k, v, None, joined

    def _through(
        self,
        span: range,
        x: Tensor,
        order: Order,
        rotary: Rotary,
        rows: Rows | Chunks,
        pool: KVPool,
        aux_layer_ids: tuple[int, ...],
        other: NativeLayers | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [N, E] fp32, in this order, through layers `span`: outputs [N, E], normed, features [N, n·E] and K/V
        [L, N, Hkv, D]; x becomes the last layer's output. `other` has the attention of rows that join.
        """
        body, dtype, hidden = self._config, self._dtype, x.shape[1]
        assert pool.dtype == dtype
        kept, angles = order.kept, self._angles(rotary, rows, order.kept)
        context, width = rows.where.context_len.long().contiguous(), rows.where.pages.shape[1]
        masks = [_mask(rows, *view, kept) for view in self._views]
        tables = [pool.page_table(rows, layer).long().contiguous() for layer in self._views.values()]
        views = [
            library.View(*_strided(allowed), address(first), address(table), width, address(cos), address(sin))
            for (allowed, first), table, (cos, sin) in zip(masks, tables, angles, strict=True)
        ]
        assert int(context.max()) <= width * pool.page_size, "the context is longer than its pages"
        aux = torch.tensor(aux_layer_ids, dtype=torch.long)
        k, v = torch.empty(2, len(span), len(x), body.num_kv_heads, body.head_dim, dtype=dtype)
        features = torch.empty(len(x), len(aux_layer_ids) * hidden, dtype=dtype)
        out = torch.empty(len(x), hidden, dtype=dtype)
        arguments = library.Pass(
            len(context), order.longest, address(order.starts), address(x),
            (library.View * len(views))(*views), len(views), *map(library.addresses, pool.addresses), pool.page_size,
            address(context), address(k), address(v),
            address(aux), len(aux_layer_ids), address(features), address(out), span.start, span.start,
            span.start, None if other is None else other._layers, order.own,
        )  # fmt: skip
        with self._lock:
            for index in [layer for layer in self._between if layer in span]:
                self._run(arguments, index + 1)
                x += self._between[index](out)
                if index in aux_layer_ids:
                    place = aux_layer_ids.index(index) * hidden
                    features[:, place : place + hidden] = x
            self._run(arguments, span.stop)
        return out, features, k, v

    def _angles(self, rotary: Rotary, rows: Rows | Chunks, kept: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """cos and sin [N, D] of the rows in layers of each view."""

        def of(table: Rotary) -> tuple[Tensor, Tensor]:
            cos, sin = (_flat(part, kept).contiguous() for part in table(rows.positions, torch.float32))
            return cos, sin

        everywhere, local = of(rotary), None if self._local_rotary is None else of(self._local_rotary)
        return [everywhere if local is None or window is None else local for window, _ in self._views]

    def _run(self, arguments: library.Pass, end: int) -> None:
        """Run the layers from where the pass is up to `end`."""
        arguments.begin, arguments.end = arguments.end, end
        body, memory = ctypes.byref(self._body), ctypes.byref(self._memory)
        library.functions().d2sd_layers(body, ctypes.byref(arguments), memory, torch.get_num_threads())

    def keys_values(self, projected: Tensor, norm: RMSNorm, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
        """projected [B, C, E], before `norm` -> rotated keys and values of every layer [L, B, C, Hkv, D]."""
        assert self._context is not None
        product, k_norm = self._context
        body, x = self._config, projected.flatten(0, 1).float().contiguous()
        scale = norm.scale.detach().float().contiguous()
        angles = [part.flatten(0, -2).contiguous() for part in rotary(positions, torch.float32)]
        shape = body.num_layers, *positions.shape, body.num_kv_heads, body.head_dim
        k, v = torch.empty(2, *shape, dtype=self._dtype)
        sizes = len(x), x.shape[1], body.num_layers, body.num_kv_heads, body.head_dim, library.TYPES[self._dtype]
        room = torch.empty(len(x), x.shape[1] + x.shape[1] % 2), torch.empty(len(x), product.outputs)
        struct = product.struct
        tensors = scale, k_norm, x, *angles, *room, k, v
        arguments = library.Context(*sizes, norm.eps, ctypes.pointer(struct), *map(address, tensors))
        library.functions().d2sd_keys_values(ctypes.byref(arguments), torch.get_num_threads())
        return k, v


def _free(memory: library.Memory) -> None:
    library.functions().d2sd_free(ctypes.byref(memory))


def _context(layers: Sequence[Layer]) -> tuple[library.PackedLinear, Tensor | None]:
    """The product that makes keys and values [2·L·Hkv·D] of a context, and the scales [L, D] of its keys' norms."""
    attentions = [layer.self_attn for layer in layers]
    parts = [attn.k_proj for attn in attentions] + [attn.v_proj for attn in attentions]
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    product = library.PackedLinear.of(torch.cat([part.weight for part in parts]), bias)
    scales = [attn.k_norm.scale.detach().float() for attn in attentions if isinstance(attn.k_norm, RMSNorm)]
    return product, torch.stack(scales) if scales else None


def _mask(
    rows: Rows | Chunks, window: int | None, causal: bool, kept: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The mask of rows in layers of one view: of trees [B, T, T], and the first position, [N] int64 or None: 0."""
    mask = windowed(rows, window, causal)
    if isinstance(mask, ChunkMask):
        return None, None if mask.first is None else mask.first.long().contiguous()
    allowed = mask.allowed if mask.allowed.stride(2) == 1 else mask.allowed.contiguous()
    return allowed, None if mask.first is None else _flat(mask.first.long(), kept).contiguous()


def _strided(mask: Tensor | None) -> tuple[int | None, int, int]:
    """Address and strides [B, T] of a mask."""
    return (None, 0, 0) if mask is None else (mask.data_ptr(), mask.stride(0), mask.stride(1))


def _flat(x: Tensor, kept: Tensor | None) -> Tensor:
    """x [B, T, ...] -> [N, ...], of the rows `kept` or of all."""
    x = x.flatten(0, 1)
    return x if kept is None else x[kept]


def _padded(weight: Tensor) -> Tensor:
    """Zero outputs after the last, up to a whole panel."""
    return torch.cat([weight, weight.new_zeros(-len(weight) % PANEL, *weight.shape[1:])])


def packed_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x [..., in] -> x Wᵀ + b by the compiled kernels, which return fp32, or where they are missing by PyTorch."""
    if weight.dtype in library.TYPES and library.available():
        return library.PackedLinear.of(weight, bias)
    return partial(F.linear, weight=weight, bias=bias)


class PackedLinear(nn.Module):
    """A linear layer by a product of packed or converted weights; holds no parameters, so it can only serve."""

    def __init__(self, product: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._product = product

    @classmethod
    def of(cls, layer: nn.Linear | Fp8Linear | ComputedLinear, dtype: torch.dtype) -> PackedLinear:
        """Convert the weights of a layer once, for a model of `dtype`."""
        if isinstance(layer, ComputedLinear):
            return cls(layer.carried(dtype, partial(packed_product, bias=None)))
        bias = None if layer.bias is None else layer.bias.detach()
        if not isinstance(layer, Fp8Linear):
            return cls(packed_product(layer.weight.detach(), bias))
        given = layer.weight.to(carrier(dtype)), layer.input_scale, layer.weight_scale, bias
        return cls(lambda x: carried_product(x, *given))

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x).to(x.dtype)


def pack(model: TargetModel | DraftModel, target: TargetModel | None = None) -> None:
    """Replace the layers of a CPU model, and give a target's head a packed copy: a step of `prepare_for_inference`.

    `target` lends its MLPs to a drafter that borrows them, and is packed before; if it is not compiled, nor is the
    drafter.

    Packing twice is fine. Afterwards `state_dict` lacks the replaced weights: a packed model can only serve.
    """
    weight = next((parameter for parameter in model.parameters() if parameter.dtype != torch.float8_e4m3fn), None)
    if weight is None:
        return
    shared = target.compiled if isinstance(target, Decoder) else None
    assert shared is None or isinstance(shared, NativeLayers)
    alike = target is None or shared is not None
    if alike and model.is_plain and supported(body := model.config.body, model.own_layers, weight.dtype):
        context = isinstance(model, Drafter)
        model.replace_layers(NativeLayers(body, model.own_layers, model.norm, context=context, target=shared))
    elif not library.available():
        _say_why(str(library.load()))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Fp8Linear | ComputedLinear) or (type(child) is nn.Linear and name != "lm_head"):
                setattr(parent, name, PackedLinear.of(child, weight.dtype))
            elif isinstance(child, FeedForward):
                setattr(parent, name, child.packed(packed_product))
    if isinstance(model, TargetModel) and model.packed_head is None:
        model.packed_head = packed_product(model.head.detach(), None)


@cache
def _say_why(reason: str) -> None:
    logger.warning("layers run as PyTorch operators, several times slower: %s", reason)
