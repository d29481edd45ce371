"""The target: one decoder for every family, over rows with an attention mask and paged K/V."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.config import DecoderConfig
from d2sd.modeling.feed_forward import soft_cap
from d2sd.modeling.inference import ServedModel
from d2sd.modeling.joining import JoinedAttention
from d2sd.modeling.kv_pool import Chunks, KVPool, PoolSizes, Rows
from d2sd.modeling.layers import CosSin, KeysValues, Rotary, layer_of, norm_of
from d2sd.modeling.state_pool import StatePass, StateRows
from d2sd.modeling.tensor_parallel import SharedHead
from d2sd.modeling.where import Where

# Shape letters: B requests, T rows, E hidden, V vocabulary, L layers, Hkv heads, D head size, n auxiliary layers.


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """Nothing is committed yet: `KVPool.write` does that for the rows that are accepted."""

    hidden: Tensor  # [B, T, E], normed: ready for the head
    features: Tensor  # [B, T, n·E], outputs of the auxiliary layers, concatenated in the order of `aux_layer_ids`
    k: Tensor  # [L, B, T, Hkv, D], of the layers that attend; or as `KeysValues.stack` joins heads that differ
    v: Tensor  # [L, B, T, Hkv, D]
    states: StateRows | None = None  # of trees in hybrids; chunks advance states in the pass
    joined: Tensor | None = None  # [B, T, G, E], normed, of the rows that joined behind each row

    def commit(self, pool: KVPool, where: Where, positions: Tensor, keep: Tensor, path: Tensor) -> None:
        """Append rows `path [B, G]` where `keep [B, G]` at these positions, and advance the states along them."""
        pool.write(self.k, self.v, where.tables, positions, keep, path)
        if self.states is not None and pool.states is not None and where.state_ids is not None:
            self.states.commit(pool.states, where.state_ids, path, keep.sum(1))


class Embedding(nn.Embedding):
    """Embeddings times a scale, which is rounded to their type first, as transformers does."""

    def __init__(self, size: int, hidden: int, scale: float) -> None:
        super().__init__(size, hidden)
        self._scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.rounded_scale

    @property
    def rounded_scale(self) -> float:
        with torch.device("cpu"):
            return torch.tensor(self._scale).to(self.weight.dtype).item()


def embedding_of(config: DecoderConfig) -> nn.Embedding:
    """The table of a target's embeddings."""
    size, scale = (config.vocab_size, config.body.hidden_size), config.embedding_scale
    return nn.Embedding(*size) if scale == 1 else Embedding(*size, scale)


class TargetModel(ServedModel):
    """A target that the runtime can run. The layers are a `Decoder`'s, or an exported graph; tables are PyTorch's."""

    config: DecoderConfig
    embed_tokens: nn.Embedding
    lm_head: nn.Linear  # missing where `config.tie_word_embeddings`
    packed_head: Callable[[Tensor], Tensor] | None  # see d2sd.modeling.native
    shared_head: SharedHead | None = None  # where `head` is a rank's part of it
    vocab_rows: slice | None = None  # of the head, which a rank has

    @property
    def head(self) -> Tensor:
        """[V, E] weight of the language-model head; the embedding itself where they are tied."""
        if not self.config.tie_word_embeddings:
            return self.lm_head.weight
        weight = self.embed_tokens.weight
        return weight if self.vocab_rows is None else weight[self.vocab_rows]

    def head_rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` of the whole head, in a copy."""
        weight = self.head.detach()
        return weight[ids] if self.shared_head is None else self.shared_head.rows(weight, ids)

    @property
    def embedding(self) -> Tensor:
        """[V, E], what layers read of each token."""
        table, weight = self.embed_tokens, self.embed_tokens.weight
        return weight * table.rounded_scale if isinstance(table, Embedding) else weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., V] in fp32, so that the argmax breaks ties at the same precision everywhere."""
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """`logits` in the type of the head, for kernels that convert them in registers; in fp32 if they are capped."""
        logits = F.linear(hidden, self.head) if self.packed_head is None else self.packed_head(hidden)
        logits = logits if self.shared_head is None else self.shared_head.logits(logits)
        return logits if self.config.logit_cap is None else soft_cap(logits, self.config.logit_cap)

    def forward(
        self, tokens: Tensor, rows: Rows | Chunks, pool: KVPool, aux_layer_ids: tuple[int, ...] = ()
    ) -> DecoderOutput:
        """tokens [B, T], of chunks [1, N]; `aux_layer_ids` are layer ids whose outputs the drafters read (see
        `DrafterConfig.target_layer_ids`).
        """
        raise NotImplementedError


class Decoder(TargetModel):
    """Parameter names equal Hugging Face's without their leading `model.`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        body = config.body
        self.embed_tokens = embedding_of(config)
        self.layers = nn.ModuleList(layer_of(body, index) for index in range(body.num_layers))
        self.norm = norm_of(body)
        size = body.head_dim if body.global_heads is None else body.global_heads[1]
        self.rotary = Rotary(body.rope, body.rotary_dim or size)
        self._local_rotary = None if body.local_rope is None else Rotary(body.local_rope, body.head_dim)
        self.packed_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(body.hidden_size, config.vocab_size, bias=False)

    def forward(
        self, tokens: Tensor, rows: Rows | Chunks, pool: KVPool, aux_layer_ids: tuple[int, ...] = ()
    ) -> DecoderOutput:
        if self.compiled is not None:
            given = self.compiled.input_of(tokens, self.embed_tokens)
            return DecoderOutput(*self.compiled(given, self.rotary, rows, pool, aux_layer_ids))
        x, count, joining = self.embed_tokens(tokens), tokens.shape[1], rows.joining
        others = () if joining is None else joining.model.own_layers
        split = len(self.own_layers) - len(others)
        angles, memories = self._arguments(rows, pool, x)
        aux_outputs: dict[int, Tensor] = {}
        committable = list[KeysValues](), list[StateRows]()
        for index, layer in enumerate(self.own_layers):
            own = cast("list[Any]", committable[layer.mixer.recurrent])
            if joining is not None and index == split:
                x = torch.cat([x, joining.x.expand(len(x), count * joining.size, -1)], 1)
                angles, memories = self._arguments(joining.beside(rows), pool, x)
            mixer = JoinedAttention(layer.self_attn, others[index - split].self_attn, count) if index >= split else None
            x, of_rows = layer(x, angles[index], len(own), memories[layer.mixer.recurrent], mixer)
            own.append(of_rows)
            if index in aux_layer_ids:
                aux_outputs[index] = x[:, :count]
        features = torch.cat([aux_outputs[i] for i in aux_layer_ids], dim=-1) if aux_layer_ids else x[:, :count, :0]
        keys_values, states = committable
        stacked = type(states[0]).stack(states) if states and isinstance(rows, Rows) else None
        hidden = self.norm(x)
        joined = None if joining is None else hidden[:, count:].unflatten(1, (count, joining.size))
        return DecoderOutput(hidden[:, :count], features, *KeysValues.stack(keys_values), stacked, joined)

    def _arguments(self, rows: Rows | Chunks, pool: KVPool, x: Tensor) -> tuple[list[CosSin], tuple[Any, Any]]:
        """Arguments of layers over `rows` x: rotations, and what attention and recurrences read."""
        attend = pool.attend(rows, exact=not x.is_cuda and self.packed_head is not None)
        states = None if pool.states is None else StatePass(pool.states, rows)
        return self.angles(rows.positions, x.dtype), (attend, states)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> list[CosSin]:
        """The rotation of rows at `positions` in each layer."""
        body = self.config.body
        everywhere = self.rotary(positions, dtype)
        if self._local_rotary is None:
            return [everywhere] * body.num_layers
        local = self._local_rotary(positions, dtype)
        return [everywhere if window is None else local for window in body.windows]

    def full_pass(self, tokens: Tensor, aux_layer_ids: tuple[int, ...] = ()) -> DecoderOutput:
        """One causal pass over tokens [B, T] from position 0, which reads no pages."""
        batch, weight = len(tokens), self.embed_tokens.weight
        no_context = torch.zeros(batch, dtype=torch.long, device=weight.device)
        if self.config.body.recurrent is not None:
            return self._full_chunks(tokens, no_context, aux_layer_ids)
        rows = Rows.chain(tokens.shape[1], Where(no_context[:, None], no_context))
        empty = KVPool(self.config.body, PoolSizes(1, 1), weight.dtype, str(weight.device))
        out: DecoderOutput = self(tokens, rows, empty, aux_layer_ids)
        return out

    def _full_chunks(self, tokens: Tensor, nothing: Tensor, aux_layer_ids: tuple[int, ...]) -> DecoderOutput:
        """`full_pass` of a hybrid: each text is one chunk, whose states are not kept, and not a tree of its length."""
        count, weight = tokens.shape[1], self.embed_tokens.weight
        where = Where(nothing[:, None], nothing, state_ids=torch.arange(1, 1 + len(tokens), device=weight.device))
        sizes = PoolSizes(1, count, states=1 + len(tokens))
        scratch = KVPool(self.config.body, sizes, weight.dtype, str(weight.device))
        rows = Chunks.of([count] * len(tokens), where, count)
        out: DecoderOutput = self(tokens.reshape(1, -1), rows, scratch, aux_layer_ids)
        hidden, features = (part.view(*tokens.shape, -1) for part in (out.hidden, out.features))
        k, v = (part.view(len(part), *tokens.shape, *part.shape[3:]) for part in (out.k, out.v))
        return DecoderOutput(hidden, features, k, v)
