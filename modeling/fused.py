"""The layers of a model on CUDA: few, large kernels, for inference. The twin of `d2sd.modeling.native`.

    before the layers: embed_norm_rope, embeddings and the first add_rms_norm

    a layer                                          in FP8
    add_rms_norm     x += branch before, norm        quantizes
    qkv              one product                     one product
    qk_norm_rope     into q and the pass's k, v      and rounds K/V to FP8 pages
    cascade attention                                quantizes
    o                product
    add_rms_norm                                     quantizes
    gate-up          one product                     one product
    silu_mul                                         quantizes
    down             product, added by the next norm

Nine kernels a layer, and in hybrids ten:

    gated attention                                  a gated delta net
    add_rms_norm     1 + weight, rounded once        add_rms_norm
    qkv              a gate behind each query        joint            q, k, v, z, b and a in one product
    qk_norm_rope     a part of each head rotates     delta_inputs     convolution, log gates, β
    cascade attention                                delta rule       from one state a request, for a whole tree
    gate_heads       quantizes                       gated_norm       times silu(z), quantizes
    o                product                         out              product

What rows write into states goes where a commit of all layers reads it: two launches a step. Experts
(`d2sd.modeling.experts`) run as they are in the place of the last three; so does the one that all rows share.

Rows of context that a drafter injects as it drafts are in the qkv products of the draft; `qk_norm_rope` writes their
K/V to the pages before the layer attends. Without a draft, K/V of all layers are one product and one `qk_norm_rope`; in
FP8 a product a layer, because no FP8 product is batched. A drafter that borrows the target's MLPs has a qkv and an o
product of its own; all else is the target's fused layers'. Where its rows join the target's pass, both have products of
attention and rotations of their own, and all else once.

Values are `layers.py`'s: ops round where it rounds. In FP8 an input that several products share is quantized once, with
the largest of their scales. E4M3 is a floating-point type, so that costs no precision but next to zero. The weights of
a joint product have one scale where `d2sd build` quantized them; where each has its own, the product is of sums in
fp32, twice the bytes, and the next op scales them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from d2sd.errors import D2SDError
from d2sd.modeling.config import BodyConfig
from d2sd.modeling.decoder import Decoder, TargetModel
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.fp8 import Fp8Cache, Fp8Linear
from d2sd.modeling.fused_context import ContextProduct
from d2sd.modeling.fused_layer import FusedAttention, FusedLayer, JoinedAttention
from d2sd.modeling.fused_pass import Pass, PassWithContext, Shared, numbers
from d2sd.modeling.inference import ContextLayers, LayerOutputs
from d2sd.modeling.kv_pool import Chunks, CommittedRows, KVPool, Rows, windowed
from d2sd.modeling.layers import Layer, RMSNorm, Rotary, TokenRows
from d2sd.modeling.product import Linear, Product, unjoinable
from d2sd.modeling.quantized import ComputedLinear, QuantizedLinear
from d2sd.modeling.state_pool import StatePass
from d2sd.plugins import dispatch
from d2sd.plugins.layer_ops import Front, add_rms_norm, embed_norm_rope, linear

# Shape letters: B requests, T rows, N rows of chunks, R = B·T or N, E hidden, I intermediate, L layers, Hq/Hkv query
# and K/V heads, D head size, n auxiliary layers.


def fuse(model: TargetModel | DraftModel, target: TargetModel | None = None, *, exact: bool = False) -> None:
    """Replace the layers of a CUDA model: a step of `prepare_for_inference`. Fusing twice is fine.

    `target` lends its MLPs to a drafter that borrows them, and is fused before; if it is not, nor is the drafter.
    `exact`, of a target: products, the head's too, and attention are batch-invariant.

    Afterwards `state_dict` lacks their weights, which are not kept twice: a fused model can only serve. Where this GPU
    or these layers cannot be fused, they stay, after a warning.
    Raises `D2SDError` instead of that warning under `D2SD_NO_FALLBACK=1`, or if `exact`.
    """
    if not model.is_plain:
        return
    compiled = target.compiled if isinstance(target, Decoder) else None
    shared = compiled if isinstance(compiled, FusedLayers) else None
    if target is not None and shared is None:
        return
    quantized = [module for module in model.modules() if isinstance(module, QuantizedLinear | Fp8Cache)]
    body, weight, context = model.config.body, model.norm.weight, isinstance(model, Drafter)
    for module in quantized:
        if isinstance(module, ComputedLinear):
            module.prepare()
    unlike = _unlike(body, model.own_layers, context=context, exact=exact)
    if not dispatch.use_fused_layers(weight, body.head_dim, fp8=bool(quantized), unlike=unlike):
        if exact:
            raise D2SDError(
                "A batch-invariant step needs fused layers, which this GPU or model does not have.",
                where="exact",
                fix="a line on stderr says what is missing; serve it on a CPU, or build it without `exact`",
            )
        return
    layers = FusedLayers(body, model.own_layers, model.norm, context=context, target=shared, exact=exact)
    model.replace_layers(layers)
    if isinstance(model, Drafter):
        fc = cast("Linear", model.fc)
        model.fc = Product([fc], weight.dtype, has_room=isinstance(fc, Fp8Linear))  # type: ignore[assignment]
    elif isinstance(model, Decoder):
        head = model.head.detach()
        model.packed_head = partial(linear, weight=head) if exact else Product.of(head)
    torch.cuda.empty_cache()  # the parts that were joined


def _unlike(body: BodyConfig, layers: Sequence[Layer], *, context: bool, exact: bool) -> str | None:
    """Reason the projections cannot be fused: other layers, foreign modules, mixed linear types, scales that do not
    allow it, or experts that have to be exact.
    """
    if body.beyond_fused:
        return " and ".join(body.beyond_fused)
    for layer in layers:
        if exact and not layer.mlp.products():
            return "products of experts are not batch-invariant"
        for group in (*layer.mixer.groups(exact=exact), *layer.mlp.products()):
            if reason := unjoinable(group, context=context, exact=exact):
                return reason
    return None


def _share_input_scale(layers: Sequence[Layer]) -> None:
    """One scale, the largest, for the inputs of the FP8 qkv products of all layers: a context is quantized once."""
    attentions = [layer.self_attn for layer in layers]
    parts: list[nn.Module] = [part for attn in attentions for part in (attn.q_proj, attn.k_proj, attn.v_proj)]
    quantized = [part for part in parts if isinstance(part, Fp8Linear)]
    if quantized:
        largest = torch.stack([part.input_scale for part in quantized]).max()
        for part in quantized:
            part.input_scale = largest


class FusedLayers(ContextLayers):
    """A model's layers and last norm. They hold no parameters: they can only serve."""

    def __init__(
        self,
        body: BodyConfig,
        layers: Sequence[Layer],
        norm: RMSNorm,
        *,
        context: bool = False,
        target: FusedLayers | None = None,
        exact: bool = False,
    ) -> None:
        """Takes the weights out of `layers` one by one, so that no more than a layer's are held twice.

        `context`: for drafters, which make keys and values of a context too. `target`: its last layers lend their MLPs.
        """
        super().__init__()
        if context:
            _share_input_scale(layers)
        self._config, self.exact = body, exact
        self._dtype, self._norm = norm.weight.dtype, norm.weight.detach()
        self._layers: list[FusedLayer] = []
        shared = [None] * len(layers) if target is None else target._layers[-len(layers) :]
        for layer, of_target in zip(layers, shared, strict=True):
            self._layers.append(FusedLayer(layer, body, self._dtype, of_target, exact=exact))
        kinds = [type(layer.mixer) for layer in self._layers]
        self._places = [kinds[:index].count(kind) for index, kind in enumerate(kinds)]  # among layers of their kind
        self._context: ContextProduct | None = None
        if context:
            self._context = ContextProduct([(one.joint, one.heads) for one in self._attentions], body)

    @property
    def _attentions(self) -> list[FusedAttention]:
        mixers = (layer.mixer for layer in self._layers)
        return [mixer for mixer in mixers if isinstance(mixer, FusedAttention)]

    @property
    def products(self) -> list[Product]:
        """All products, layer by layer, those of a target that lends them among them."""
        return [product for layer in self._layers for product in layer.products]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of all products, and of experts."""
        projections = [product for layer in self._layers for product in layer.mixer.products]
        inner = sum(layer.feed_forward.nbytes for layer in self._layers)
        return sum(product.weight.nbytes for product in projections) + inner

    @property
    def kv_scales(self) -> tuple[Tensor, Tensor] | None:
        """Scales of FP8 pages, (k, v), [L] fp32 each; None where the pages are not FP8."""
        heads = [attention.heads for attention in self._attentions]
        if heads[0].k_scale is None:
            return None
        k, v = (torch.cat([cast("Tensor", getattr(head, name)) for head in heads]) for name in ("k_scale", "v_scale"))
        return k, v

    def input_of(self, tokens: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor | TokenRows:
        # Subclasses of nn.Embedding do more than look up.
        return TokenRows(tokens, embed.weight.detach()) if type(embed) is nn.Embedding else embed(tokens)

    def forward(
        self,
        x: Tensor | TokenRows,
        rotary: Rotary,
        rows: Rows | Chunks,
        pool: KVPool,
        aux_layer_ids: tuple[int, ...] = (),
    ) -> LayerOutputs:
        """x [B, T, E], of chunks [1, N, E], or its tokens -> the fields of `DecoderOutput`."""
        with torch.cuda.device_of(numbers(x)):  # type: ignore[no-untyped-call]
            out = Pass(self._config, x, rows, aux_layer_ids)
            residual, branch = self._run(out, x, rotary, rows, pool)
            count, joining = len(residual), rows.joining
            if joining is not None:
                residual, branch = self._joined(out, residual, branch, rotary, rows, pool)
            total, offset = out.columns.get(len(self._layers) - 1), self._config.norm_offset
            given = residual, branch, self._norm, self._config.rms_norm_eps
            hidden = add_rms_norm(*given, total=total, offset=offset)
            joined = None if joining is None else hidden[count:].view(*x.shape[:2], joining.size, -1)
            return hidden[:count].view(x.shape), out.features, out.k, out.v, out.states, joined

    def _begin(
        self, out: Pass, given: Tensor | TokenRows, rotary: Rotary, rows: Rows | Chunks
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual stream [R, E] before the first layer, the input of its joint product, and cosines and sines."""
        first, eps, front = self._layers[0], self._config.rms_norm_eps, out.front
        scale, joint = first.mixer.input_scale, out.joint
        if isinstance(given, TokenRows):
            placed = rows.placed if isinstance(rows, Rows) else rows.positions
            made = first.mixer.room(given.tokens.numel()) if joint is None else joint
            tokens = *given, first.input_norm, eps, placed, *rotary.factors
            return embed_norm_rope(*tokens, scale=scale, out=made, front=front, offset=first.offset)
        x, normed = given.reshape(-1, given.shape[-1]), out.normed
        if joint is not None and front is not None:
            add_rms_norm(front.x, None, front.weight, eps, scale=scale, out=joint[: len(front.x)])
        made = first.mixer.room(len(x)) if normed is None else normed
        normed = first.norm(x, None, eps, None, made)
        return x, normed, *rotary.tables(rows.positions, x.dtype, None if front is None else front.positions)

    def _joined(
        self, out: Pass, stream: Tensor, branch: Tensor, rotary: Rotary, rows: Rows | Chunks, pool: KVPool
    ) -> tuple[Tensor, Tensor]:
        """`_run` through the layers that rows join, which come after all of the pass's own: [R + U, E]."""
        assert rows.joining is not None
        assert not out.columns, "features are of passes that none join"
        others, both, eps = rows.joining.compiled(FusedLayers), rows.joining.beside(rows), self._config.rms_norm_eps
        count = rows.joining.size * len(stream)
        stream = torch.cat([stream, rows.joining.x.expand(count, -1)])
        branch = torch.cat([branch, torch.zeros_like(stream[-count:])])
        attention = JoinedAttention(out, both, rotary, pool.attend(both, exact=self.exact))
        first = len(self._layers) - len(others._layers)
        for index, (own, other) in enumerate(zip(self._layers[first:], others._layers, strict=True), first):
            normed = add_rms_norm(stream, branch, own.input_norm, eps, total=stream, offset=own.offset)
            branch = own.mlp(stream, attention(index, normed, (own.mixer, other.mixer)), eps, stream)
        return stream, branch

    def _run(
        self, out: Pass, given: Tensor | TokenRows, rotary: Rotary, rows: Rows | Chunks, pool: KVPool
    ) -> tuple[Tensor, Tensor]:
        """All layers over rows [B, T, E], or those before others join -> the residual stream [R, E], and what is to be
        added to it.
        """
        eps, exact, states, mask = self._config.rms_norm_eps, self.exact, None, None
        x, normed, cos, sin = self._begin(out, given, rotary, rows)
        if pool.states is not None:
            mask = windowed(rows, None, counters=pool.counters)
            states = StatePass(pool.states, rows, exact=exact, mask=mask)
        shared = Shared(cos, sin, pool.attend(rows, exact=exact, mask=mask), states)
        buffer, branch = torch.empty_like(x), None
        stop = None if rows.joining is None else -rows.joining.layers
        for index, layer in enumerate(self._layers[:stop]):
            if branch is not None:
                total = out.columns.get(index - 1, buffer)
                made = layer.mixer.room(len(x)) if out.normed is None else out.normed
                normed = layer.norm(x, branch, eps, total, made)
                x = total
            branch = layer.mix(self._places[index], normed, out, shared)
            x, branch = buffer, layer.mlp(x, branch, eps, buffer)
        assert branch is not None
        return x, branch

    def with_context(
        self,
        context: CommittedRows,
        front: Front,
        x: Tensor | TokenRows,
        rotary: Rotary,
        rows: Rows,
        pool: KVPool,
        *,
        block: int = 0,
        head: Product | None = None,
    ) -> Tensor:
        """See `ContextLayers.with_context`."""
        with torch.cuda.device_of(front.x):  # type: ignore[no-untyped-call]
            out = PassWithContext(self._config, x, context, front, pool, self._layers[0].mixer.joint)
            residual, branch = self._run(out, x, rotary, rows, pool)
            count = len(residual) - (len(residual) // block if block else 0)
            scale, room = (None, None) if head is None else (head.input_scale, head.room(count))
            given = residual, branch, self._norm, self._config.rms_norm_eps
            return add_rms_norm(*given, scale=scale, out=room, block=block).view(x.shape[0], -1, x.shape[2])

    def keys_values(self, projected: Tensor, norm: RMSNorm, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
        """projected [B, C, E], before `norm` -> rotated keys and values of every layer [L, B, C, Hkv, D]."""
        assert self._context is not None
        with torch.cuda.device_of(projected):  # type: ignore[no-untyped-call]
            rows = projected.flatten(0, 1)
            context = add_rms_norm(rows, None, norm.weight, norm.eps, scale=self._context.input_scale)
            cos, sin = rotary.tables(positions, projected.dtype)
            k, v = self._context(context, cos, sin)
            shape = len(k), *projected.shape[:2], *k.shape[2:]
            return k.view(shape), v.view(shape)
