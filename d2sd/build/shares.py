"""A plan for GPUs that share the target: sizes of one of them, and the bytes of a decode step that they exchange."""

from __future__ import annotations

from dataclasses import replace

from d2sd.build.plan import Plan
from d2sd.convert.checkpoint.headers import ITEMSIZES
from d2sd.modeling.config import BodyConfig, DecoderConfig
from d2sd.modeling.shard import Shard, check_divisible

#: Numbers of GPUs that a plan shows, where the target can be divided so.
SIZES = (2, 4, 8)


def of_one_gpu(plan: Plan, size: int) -> Plan:
    """The plan of one of `size` GPUs that share the target. Raises D2SDError if they cannot.

    Weights are counted at the bytes that one has on average: of what is cut, the cut part.
    """
    if size == 1 or plan.target is None:
        return plan
    part, config = plan.target, plan.target.config
    assert isinstance(config, DecoderConfig)
    check_divisible(config, size)
    body, itemsize = Shard(0, size).body(config.body), ITEMSIZES[plan.recipe.precision]
    tables, own_tables = (table_weights(config, ranks) for ranks in (1, size))
    layers = part.parameters - tables
    own = layers - _cut_weights(config.body) + _cut_weights(body)
    weights = round((part.weight_bytes - tables * itemsize) * own / layers) + own_tables * itemsize
    share = replace(
        part,
        config=replace(config, body=body),
        parameters=own + own_tables,
        weight_bytes=weights,
        kv_token_bytes=part.kv_token_bytes * body.num_kv_heads // config.body.num_kv_heads,
    )
    return replace(plan, target=share, ranks=size)


def table_weights(config: DecoderConfig, ranks: int) -> int:
    """Weights of embedding and head in one of `ranks` processes; a tied head is the embedding."""
    rows = config.vocab_size if config.tie_word_embeddings else config.vocab_size + -(-config.vocab_size // ranks)
    return rows * config.body.hidden_size


def _cut_weights(body: BodyConfig) -> int:
    """Weights of what is cut in all layers: products, and biases of their outputs."""
    inputs, outputs = body.hidden_size, body.head_dim * (body.num_heads + 2 * body.num_kv_heads)
    attention = inputs * (outputs + body.num_heads * body.head_dim) + (outputs if body.qkv_bias else 0)
    attention += body.num_heads if body.sinks else 0
    dense = body.num_layers if body.experts is None else len(body.experts.dense_layers)
    biases = 0 if body.experts is None or not body.experts.bias else 2 * body.experts.count  # of gates and ups
    biases *= 0 if body.experts is None else body.experts.intermediate_size * (body.num_layers - dense)
    return body.num_layers * attention + dense * 3 * inputs * body.intermediate_size + body.expert_weights + biases


def step_bytes(plan: Plan, rows: int, drafts: int = 0) -> int:
    """Bytes of the sums and logits of a step that verifies `rows` rows and drafts by the logits of `drafts` rows."""
    assert plan.target is not None
    config, itemsize = plan.target.config, ITEMSIZES[plan.recipe.precision]
    sums = 2 * config.body.num_layers * rows * config.body.hidden_size
    return itemsize * (sums + (rows + drafts) * plan.ranks * -(-config.vocab_size // plan.ranks))
