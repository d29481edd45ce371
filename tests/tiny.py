"""Tiny random models for tests: seconds become milliseconds, and every branch of the real code still runs.

Shape letters: B requests, T rows, M pages a request, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig, ExpertsConfig, Family, Role, RopeConfig
from d2sd.modeling.decoder import Decoder, DecoderOutput, TargetModel
from d2sd.modeling.drafters.dflash import DFlashModel, Drafter
from d2sd.modeling.drafters.eagle3 import Eagle3
from d2sd.modeling.drafters.eagle3_config import Eagle3Config
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.drafters.flexdraft_config import FlexConfig
from d2sd.modeling.drafters.head_configs import HeadConfig, InjectionConfig, MarkovConfig, PairConfig, SelectorConfig
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.fp8 import linear_names, make_fp8
from d2sd.modeling.kv_pool import KVPool, PoolSizes, Rows
from d2sd.modeling.layers import RMSNorm, ValueNormAttention
from d2sd.modeling.mixers.configs import DeltaConfig, ShortConvConfig
from d2sd.modeling.prepare import prepare_for_inference
from d2sd.modeling.where import Where
from d2sd.plugins.shared.fp8 import LARGEST, to_pages
from d2sd.policies import LOOKUP, NAMES, DrafterRole, PolicyName
from d2sd.runtime.model_runner import ModelRunner

_HYBRID: dict[str, Any] = {"qk_norm": True, "norm_offset": True, "rotary_dim": 4, "output_gate": True}
_SHARED = ExpertsConfig(count=6, chosen=2, intermediate_size=24, normalized=True, shared_size=40)
#: Heads without a window are wider, and there are fewer of them; half of their angles turn.
_GEMMA4: dict[str, Any] = {
    "qk_norm": True,
    "activation": "gelu_tanh",
    "wide_norms": True,
    "branch_norms": True,
    "value_norm": True,
    "layer_scale": True,
    "local_rope": RopeConfig(100.0),
    "rope": RopeConfig(10000.0, turning=0.5),
    "global_heads": (1, 32),
}
#: What a family's layers have besides, and their defaults.
FAMILY_BODIES: dict[Family, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {
        "qk_norm": True,
        "experts": ExpertsConfig(count=6, chosen=2, intermediate_size=24, normalized=True, dense_layers=(1,)),
    },
    "gpt_oss": {
        "qkv_bias": True,
        "o_bias": True,
        "sinks": True,
        "experts": ExpertsConfig(count=6, chosen=2, intermediate_size=64, normalized=True, bias=True, limit=7.0),
    },
    "gemma3_text": {
        "qk_norm": True,
        "activation": "gelu_tanh",
        "norm_offset": True,
        "branch_norms": True,
        "query_scale": (2 / 3) ** 0.5,
        "local_rope": RopeConfig(100.0),
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4 | {"global_heads": (2, 16)},
    "qwen3_next": _HYBRID | {"experts": replace(_SHARED, dense_layers=(0,))},
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID | {"experts": _SHARED, "intermediate_size": 24},  # no layer has an MLP
    "lfm2": {"qk_norm": True},
    "lfm2_moe": {
        "qk_norm": True,
        "experts": ExpertsConfig(6, 2, intermediate_size=24, normalized=True, dense_layers=(0,), sigmoid=True),
    },
}
#: Families some of whose layers have a recurrent state.
HYBRIDS: tuple[Family, ...] = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe")
GEMMAS: tuple[Family, ...] = ("gemma3_text", "gemma4_text", "gemma4_unified_text")
#: Windows of its layers in turns.
FAMILY_WINDOWS: dict[Family, tuple[int | None, ...]] = {"gpt_oss": (6, None), **dict.fromkeys(GEMMAS, (5, 5, None))}
Model = TypeVar("Model", Decoder, Drafter, FlexHead, Eagle3)
ROPE = RopeConfig(10000.0)
#: Heads that score a candidate behind its parent.
HEADS: dict[str, HeadConfig] = {
    "markov": MarkovConfig(rank=6),
    "gated markov": MarkovConfig(rank=6, gated=True, confidence=True, confidence_with_markov=True),
    "selector": SelectorConfig(rank=5, candidates=16, taps=2, group=8),
    "injection": InjectionConfig(rank=6, message=5, candidates=16),
    "pair": PairConfig(rank=5, candidates=16),
}


def tiny_decoder(
    family: Family = "llama",
    *,
    layers: int = 3,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    vocab: int = 64,
    tie: bool = True,
    attention_bias: bool = False,
    positions: int = 512,
    seed: int = 0,
    rope: RopeConfig = ROPE,
    **changes: Any,
) -> Decoder:
    """A random target whose greedy text wanders and whose best two logits are clearly apart.

    `attention_bias` is Hugging Face's field of Llama and Qwen3: biases on q, k, v and o. Qwen2 has three anyway.
    `changes` are of other fields of `BodyConfig`.
    """
    body = BodyConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=rope,
        max_positions=positions,
        qk_norm=False,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
    )
    if family in FAMILY_WINDOWS:
        changes = {"windows": (FAMILY_WINDOWS[family] * layers)[:layers]} | changes
    if "value_norm" in FAMILY_BODIES[family]:
        changes = {"query_scale": head_dim**0.5} | changes
    if "output_gate" in FAMILY_BODIES[family]:
        changes = {"recurrent": tiny_delta(layers, joined=family == "qwen3_next")} | changes
    if family.startswith("lfm2"):
        changes = {"recurrent": ShortConvConfig(recurrent_layers(layers), hidden, taps=3)} | changes
    body = replace(body, **FAMILY_BODIES[family] | changes)
    scale = hidden**0.5 if family in GEMMAS else 1.0
    decoder = Decoder(DecoderConfig(family, body, vocab, tie, scale, 5.0 if family == "gemma4_text" else None))
    # A strong write into the residual stream: under a tied head it would otherwise repeat the token it has just read.
    randomise(decoder, seed, residual_gain=2.0 if body.recurrent is None else 5.0)  # gates weaken it
    return decoder


def recurrent_layers(layers: int) -> tuple[int, ...]:
    """All layers but every third and the last."""
    return tuple(layer for layer in range(layers - 1) if layer % 3 != 2)


def tiny_delta(layers: int, *, joined: bool = False) -> DeltaConfig:
    """Gated delta nets."""
    return DeltaConfig(recurrent_layers(layers), key_heads=2, value_heads=4, key_size=8, value_size=12, joined=joined)


def tiny_drafter(
    target: DecoderConfig,
    *,
    role: Role = "first",
    layers: int = 2,
    block_size: int = 4,
    sample_from_anchor: bool = False,
    mask_token_id: int | None = None,
    target_layer_ids: tuple[int, ...] | None = None,
    head: HeadConfig | None = None,
    attention: Mapping[str, Any] | None = None,
    mask_embedding: bool = False,
    seed: int = 1,
) -> Drafter:
    """A random drafter. Unless told, its mask is the last token, and the first and the last layer but one feed it.

    `attention` are fields of its body: windows, causality, sinks.
    """
    body = target.body
    if target_layer_ids is None:
        target_layer_ids = tuple(sorted({0, max(body.num_layers - 2, 0)}))
    config = DrafterConfig(
        body=BodyConfig(
            hidden_size=body.hidden_size,
            intermediate_size=body.intermediate_size,
            num_layers=layers,
            num_heads=body.num_heads,
            num_kv_heads=body.num_kv_heads,
            head_dim=body.head_dim,
            rms_norm_eps=body.rms_norm_eps,
            rope=replace(body.rope, turning=1.0),
            max_positions=body.max_positions,
            qk_norm=True,
            qkv_bias=False,
            o_bias=False,
            **(attention or {}),
        ),
        vocab_size=target.vocab_size,
        block_size=block_size,
        mask_token_id=target.vocab_size - 1 if mask_token_id is None else mask_token_id,
        target_layer_ids=target_layer_ids,
        num_target_layers=body.num_layers,
        role=role,
        prefix_weight_base=0.9 if role == "variable_prefix" else None,
        head=head,
        logit_cap=target.logit_cap,
        mask_embedding=mask_embedding,
        sample_from_anchor=sample_from_anchor,
    )
    drafter = Drafter(config)
    randomise(drafter, seed, residual_gain=1.0)
    return drafter


def tiny_flex(
    target: Decoder,
    *,
    layers: int = 1,
    block_size: int = 4,
    draft_vocabulary: tuple[int, ...] | None = None,
    anchored: bool = False,
) -> FlexHead:
    """A random FlexDraft head in the last `layers`, joined to `target`."""
    config = target.config
    head = FlexHead(
        FlexConfig(
            family=config.family,
            body=replace(config.body, num_layers=layers, windows=config.body.windows[-layers:]),
            vocab_size=config.vocab_size,
            block_size=block_size,
            num_target_layers=config.body.num_layers,
            calibration_size=8,
            anchored=anchored,
            draft_vocabulary=draft_vocabulary,
        )
    )
    randomise(head, 4, residual_gain=1.0)
    head.join(target)
    return head


def tiny_eagle(
    target: DecoderConfig,
    *,
    steps: int = 3,
    draft_vocabulary: tuple[int, ...] | None = None,
    target_layer_ids: tuple[int, ...] | None = None,
    seed: int = 5,
    **changes: Any,
) -> Eagle3:
    """A random EAGLE-3 head that, unless told, reads the first layer, the middle one and the last but one; `changes`
    are of its layer, whose positions are not the target's.
    """
    body = target.body
    layer = replace(body.dense(1), **{"rope": RopeConfig(500.0)} | changes)
    usual = tuple(sorted({0, body.num_layers // 2, max(body.num_layers - 2, 0)}))
    head = Eagle3(Eagle3Config(layer, target.vocab_size, 1 + steps, target_layer_ids or usual, draft_vocabulary))
    randomise(head, seed, residual_gain=1.0)
    return head


#: Policies with a FlexDraft head as the first drafter, by names of their own.
FLEX_CASES: dict[str, PolicyName] = {"flex": "chain", "flex_tree": "ddtree", "flex_parallel": "flex_parallel"}
#: Those of a pair, and all.
PAIR_CASES = tuple(name for name in NAMES if name not in FLEX_CASES)
CASES = (*PAIR_CASES, *FLEX_CASES)


def of_case(case: str, first: DraftModel, second: DraftModel, flex: DraftModel) -> tuple[DraftModel, DraftModel | None]:
    """The drafters in their places for one of `CASES`."""
    return (flex, None) if case in FLEX_CASES else (first, second)


def policy_name(case: str) -> PolicyName:
    """The policy of one of `CASES`."""
    return FLEX_CASES.get(case) or cast("PolicyName", case.removesuffix(LOOKUP))


def prepared(
    target: TargetModel, first: DraftModel | None = None, second: DraftModel | None = None, *, exact: bool = False
) -> tuple[TargetModel, dict[DrafterRole, DraftModel]]:
    """The arguments of a runner: models that have been prepared, as a bundle's are, and drafters by role."""
    drafters = {role: one for role, one in zip(DrafterRole, (first, second), strict=True) if one is not None}
    for drafter in drafters.values():
        if isinstance(drafter, DFlashModel):
            drafter.join(target)
    return prepare_for_inference(target, drafters, exact=exact)


def runner_of(
    target: TargetModel,
    first: DraftModel | None = None,
    second: DraftModel | None = None,
    *,
    block_size: int | None = None,
    exact: bool = False,
) -> ModelRunner:
    """A runner of the models, which are prepared."""
    return ModelRunner(*prepared(target, first, second, exact=exact), block_size=block_size)


def randomise(model: nn.Module, seed: int, residual_gain: float) -> None:
    """Draw every parameter, norms and biases too: one left at 1 or 0 hides that the code forgot to apply it."""
    generator = torch.Generator().manual_seed(seed)
    offset = any(isinstance(part, RMSNorm) and part._offset for part in model.modules())
    gemma = any("feedforward_layernorm" in name for name, _ in model.named_parameters())
    unscaled = any(isinstance(part, ValueNormAttention) for part in model.modules())  # scores are not divided by √D
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            value = 0.3 * noise
        elif parameter.dim() == 1:
            plain = not offset or "linear_attn.norm" in name
            mean = plain + (14 if ".post_" in name and gemma else 0)  # as strong a write in front of a norm
            value = mean + 0.3 * noise
        elif name.startswith(("embed_tokens", "lm_head", "draft_head")):
            value = 0.5 * noise  # the head's logits then spread by about 3
        else:
            value = noise * parameter.shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            value *= residual_gain
        if "q_norm" in name or "k_norm" in name or name.endswith(("q_proj.weight", "k_proj.weight")):
            # sharp attention: what the context says and where it stands must matter
            value *= 0.8 if unscaled and "norm" in name else 2
        parameter.data.copy_(value)
    model.eval().requires_grad_(False)


def bare_pool(layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int) -> KVPool:
    """An empty pool of this shape in fp32."""
    body = replace(tiny_decoder().config.body, num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim)
    return KVPool(body, PoolSizes(pages, page_size), torch.float32, "cpu")


def pool_for(
    body: BodyConfig,
    batch: int,
    tokens: int,
    *,
    page_size: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    fp8: tuple[Tensor, Tensor] | None = None,
) -> tuple[KVPool, Tensor]:
    """A pool with room for `tokens` of each request, and the page table [B, M].

    Pages are handed out in random order and every slot holds NaN until it is written: code that assumes pages in a row,
    or reads a slot it must not, shows at once.
    """
    pages = -(-tokens // page_size)
    pool = KVPool(body, PoolSizes(1 + batch * pages, page_size, states=1 + batch), dtype, "cpu", fp8=fp8)
    for tensor in pool.tensors:
        tensor.fill_(torch.nan)
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(seed))
    return pool, 1 + order.view(batch, pages)  # page 0 is the bin of padding rows


def feed(
    decoder: Decoder,
    tokens: Tensor,
    pool: KVPool,
    page_table: Tensor,
    context_len: Tensor,
    *,
    aux_layer_ids: tuple[int, ...] = (),
) -> DecoderOutput:
    """Run tokens [B, T] as a causal chain behind the context and commit all of them; request b has state b + 1."""
    state_ids = None if pool.states is None else 1 + torch.arange(len(tokens))
    rows = Rows.chain(tokens.shape[1], Where(page_table, context_len, state_ids=state_ids))
    out = decoder(tokens, rows, pool, aux_layer_ids)
    assert isinstance(out, DecoderOutput)
    pool.write(out.k, out.v, (page_table,), rows.positions, torch.ones_like(rows.positions, dtype=torch.bool))
    if pool.states is not None and state_ids is not None and out.states is not None:
        path = torch.arange(tokens.shape[1]).expand_as(tokens)
        out.states.commit(pool.states, state_ids, path, torch.full_like(state_ids, tokens.shape[1]))
    return out


def full_logits(decoder: Decoder, tokens: Tensor) -> Tensor:
    """[B, T] -> [B, T, V]."""
    return decoder.logits(decoder.full_pass(tokens).hidden)


def greedy_text(decoder: Decoder, prompt: list[int], length: int) -> list[int]:
    """Plain greedy continuation, one token a pass, for comparison with what speculation writes."""
    pool, page_table = pool_for(decoder.config.body, 1, len(prompt) + length)
    text, pending = list(prompt), list(prompt)
    for _ in range(length):
        context = torch.tensor([len(text) - len(pending)])
        out = feed(decoder, torch.tensor([pending]), pool, page_table, context)
        pending = [int(decoder.logits(out.hidden[0, -1]).argmax())]
        text += pending
    return text[len(prompt) :]


def random_tokens(decoder: Decoder, batch: int, length: int, seed: int = 0) -> Tensor:
    """[B, T]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(decoder.config.vocab_size, (batch, length), generator=generator)


def random_tree(nodes: int, seed: int = 0) -> list[int]:
    """Parent of each node; node 0 is the root (parent -1) and parents stand before their children."""
    generator = torch.Generator().manual_seed(seed)
    return [-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, nodes)]


def path_to(node: int, parents: list[int]) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def ancestor_mask(parents: list[int]) -> Tensor:
    """[T, T] bool: a node sees itself and its ancestors."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        mask[node, path_to(node, parents)] = True
    return mask


def in_fp8(plain: Model, linears: Sequence[str] | None = None, *, cache: bool = False) -> Model:
    """A model like this one with these layers in FP8, or all, inputs between -8 and 8; and its K/V where `cache`."""
    linears = linear_names(plain) if linears is None else linears
    with torch.device("meta"):
        model = type(plain)(plain.config)
        make_fp8(model, linears, cache=cache)
    tensors = plain.state_dict()
    for name in linears:
        scale = tensors[f"{name}.weight"].float().abs().max() / LARGEST
        tensors[f"{name}.weight"] = to_pages(tensors[f"{name}.weight"], scale)
        tensors |= {f"{name}.weight_scale": scale, f"{name}.input_scale": torch.tensor(8 / LARGEST)}
    for index in plain.config.body.attention_layers if cache else ():
        for kind in "kv":
            scale = {"k": 0.05, "v": 0.03}[kind] * (1 + index / 8)
            tensors[f"layers.{index}.self_attn.{kind}_cache.scale"] = torch.tensor(scale)
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.eval().requires_grad_(False)
