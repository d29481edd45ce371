"""Writes `trtllm/` of a bundle: TensorRT-LLM arguments of a chain and of a tree, and a module for the latter.

    trtllm/llm_args.dflash.yaml      a chain of the first drafter, with TensorRT-LLM alone
    trtllm/llm_args.d2sd_tree.yaml   d2sd's tree, for a server that imports the module
    trtllm/d2sd_trtllm/__init__.py   the module (`trtllm-serve --custom_module_dirs`)
    trtllm/triton/                   the same behind Triton: model.py and model.yaml of TensorRT-LLM's `llmapi` model

The schema of the arguments is closed: those of a tree are Eagle3's, whose dynamic trees d2sd drafts in place of Eagle.
The module reads all else from the bundle. Paths are relative to the bundle's folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.kinds import KINDS, read_kind
from d2sd.convert.trtllm.fields import MOST_SIBLINGS, RELEASE, DFlash, check_arguments
from d2sd.errors import BundleError, RecipeError
from d2sd.io import read_text, write_text
from d2sd.manifest import load_manifest
from d2sd.modeling.config import DecoderConfig, DraftConfig, DrafterConfig
from d2sd.policies import FACTS, FirstPass, PolicyName
from d2sd.recipe import Recipe
from d2sd.runtime.speculation.policy import Policy, make_policy
from d2sd.yaml_reader import parse_yaml

FOLDER, MODULE, TRITON = "trtllm", "d2sd_trtllm", "triton"
DFLASH, TREE = "llm_args.dflash.yaml", "llm_args.d2sd_tree.yaml"
#: Rows of a full batch up to which a tree has the recipe's nodes: beyond, a GPU's time grows with every row.
FULL_BATCH_ROWS = 512
#: TensorRT-LLM's own default.
_MAX_NUM_TOKENS = 8192

_HEADER = """\
# {title}
# Not yet run. Every key was checked against TensorRT-LLM's reference of {release}.
# From this bundle's folder:
#   {command}
# enable_block_reuse is off because drafters need the target's features of the prompt: with a prompt reused from the K/V
# cache they would have no context. max_seq_len is given because it determines the size of the drafters' context.
"""
_TREE_NOTES = """\
# Eagle3 is the mode whose trees TensorRT-LLM verifies; the module puts the bundle's drafters in Eagle's place, and the
# server does not start where it cannot. Every request has {nodes} nodes in every step: fewer for larger batches, by
#   d2sd trtllm args BUNDLE --nodes 32
# A worker of Dynamo:
#   {dynamo}
# Triton: docs/tensorrt-llm.md of d2sd.
"""
_TITLES = {
    DFLASH: "The first drafter with TensorRT-LLM alone: plain DFlash, one chain.",
    TREE: "d2sd's tree inside TensorRT-LLM, which verifies it: {policy}.",
}
# One process, or the workers would not see the module; no bytecode, or the bundle would contain an unlisted file.
ENVIRONMENT = "PYTHONDONTWRITEBYTECODE=1 TLLM_WORKER_USE_SINGLE_PROCESS=1"
_COMMANDS = {
    DFLASH: f"trtllm-serve target --config {FOLDER}/{DFLASH}",
    TREE: f"{ENVIRONMENT} trtllm-serve target --config {FOLDER}/{TREE} --custom_module_dirs {FOLDER}/{MODULE}",
}


def unsupported_reason(
    recipe: Recipe, first: DraftConfig | None = None, target: DecoderConfig | None = None
) -> str | None:
    """Why TensorRT-LLM cannot serve the bundle of `recipe` with this first drafter and target; None if it can."""
    if target is not None and target.body.recurrent is not None:
        return f"its drafts over {target.body.recurrent.name} were not tried, and its tree attention has none"
    if target is not None and target.body.global_heads is not None:
        return "its drafts over heads of two sizes were not tried"
    if recipe.drafters.first is None:
        return "there is no drafter"
    if first is not None and not isinstance(first, DrafterConfig):
        return "the first drafter is not DFlash"
    if recipe.precision == "fp32":
        return "its drafter attention supports 16-bit numbers only, and precision is fp32"
    if first is None:
        return None
    if first.head and not first.head.is_optional:  # it skips unknown tensors
        return f"its DFlash runs no {first.head.name} head"
    if first.sample_from_anchor:
        return "the anchor's row of the first drafter proposes, and in its DFlash does not"
    body = first.body
    parts = {"windows": body.windows, "causal blocks": body.causal, "sinks": body.sinks}
    parts["mask embedding"] = first.mask_embedding
    lacks = [name for name, there in parts.items() if there]
    return f"its DFlash was not tried with {lacks[0]}" if lacks else None


def tree_policy(recipe: Recipe, name: str | None = None) -> PolicyName:
    """The policy of trees inside TensorRT-LLM: `name`, or the recipe's, or for `auto` the largest that it can run.

    Raises RecipeError if drafters of the bundle cannot run it there.
    """
    drafters = recipe.drafters.sources.keys()
    # drafters that read pages of their own, which is all that there is for them
    runs = {name: facts.among(drafters) for name, facts in FACTS.items() if facts.first_pass is FirstPass.DRAFTER}
    there = [name for name, facts in runs.items() if drafters >= set(facts.drafters)]
    wanted = name or recipe.tree.policy
    if wanted == "auto" or (name is None and wanted not in there):
        return "hybrid" if recipe.drafters.second is not None else "ddtree"
    known = next((policy for policy in there if policy == wanted), None)
    if known is None:
        raise RecipeError(
            "This policy has no tree inside TensorRT-LLM.",
            where="the policy",
            found=wanted,
            expected=f"one of {', '.join(there)}",
        )
    return known


def policy_of(recipe: Recipe, name: PolicyName, nodes: int) -> Policy:
    """The policy with at most `nodes` nodes. Raises RecipeError as `make_policy` does."""
    tree = recipe.tree
    made = make_policy(name, block_size=tree.block_size, branches=tree.branches, row_budget=nodes, lookup=tree.lookup)
    return made.among(recipe.drafters.sources)


def write_llm_args(folder: Path, recipe: Recipe) -> None:
    """Write `folder`, a bundle's `trtllm`, next to the drafters, which must exist already. Raises `D2SDError`.

    `unsupported_reason(recipe)` must be None.
    """
    assert unsupported_reason(recipe) is None
    drafter = HFConfig.read(folder.parent / "drafter_first")
    folder.mkdir(parents=True)
    write_arguments(folder / DFLASH, arguments(drafter, recipe), "")
    values, policy = tree_arguments(drafter, recipe)
    write_arguments(folder / TREE, values, str(policy))
    for part in (MODULE, TRITON):
        (folder / part).mkdir()
    shutil.copyfile(Path(__file__).with_name(f"{MODULE}.py"), folder / MODULE / "__init__.py")
    shutil.copyfile(Path(__file__).with_name("triton_model.py"), folder / TRITON / "model.py")
    own = {"model": "target", **values, "triton_config": {"max_batch_size": 0, "decoupled": True}}
    write_text(folder / TRITON / "model.yaml", yaml.safe_dump(own, sort_keys=False))


def write_arguments(path: Path, values: dict[str, Any], policy: str) -> None:
    """Write arguments, checked, with what they are and how to start a server. Raises `BundleError`."""
    check_arguments(values, str(path))
    kind = TREE if policy else DFLASH
    header = _HEADER.format(title=_TITLES[kind].format(policy=policy), release=RELEASE, command=_COMMANDS[kind])
    if policy:
        nodes = values["speculative_config"]["max_total_draft_tokens"] + 1
        header += _TREE_NOTES.format(nodes=nodes, dynamo=" ".join(dynamo_command(values)))
    write_text(path, header + yaml.safe_dump(values, sort_keys=False))


def dynamo_command(values: dict[str, Any]) -> list[str]:
    """Return the words that start a worker of NVIDIA Dynamo (1.4 to 1.6) with a tree, in the bundle's folder.

    Dynamo takes limits as options and the rest from the file; it has no option for a module, so d2sd starts it. Modules
    in the bundle's folder are not imported.
    """
    limits = {
        f"--{key.replace('_', '-')}": str(values[key]) for key in ("max_batch_size", "max_num_tokens", "max_seq_len")
    }
    options = {"--model-path": "target"} | limits | {"--extra-engine-args": f"{FOLDER}/{TREE}"}
    start = [*ENVIRONMENT.split(), "PYTHONSAFEPATH=1", "python", "-m", "d2sd.integrations.trtllm", ".", "dynamo.trtllm"]
    return [*start, *(word for pair in options.items() for word in pair)]


def arguments(drafter: HFConfig, recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of a chain for a first drafter's config; no key that affects the output is left to a
    default.

    The drafter computes max_draft_len + 1 slots, and was trained with `block_size` of them, or more.
    """
    part = drafter.part("dflash_config")
    return _sized(recipe, {"max_batch_size": recipe.limits.max_batch}) | {
        "speculative_config": {
            "decoding_type": "DFlash",
            "speculative_model": "drafter_first",
            "max_draft_len": min(drafter.size("block_size"), recipe.tree.block_size) - 1,
            "mask_token_id": part.get("mask_token_id", int),
            "target_layer_ids": list(part.integers("target_layer_ids")),
            "attention_backend": "VANILLA",  # FlashAttention; TRTLLM is for SM100 and SM103 only
        }
    }


def _sized(recipe: Recipe, batch: dict[str, int]) -> dict[str, Any]:
    """Arguments of a chain and of a tree alike."""
    most = {"max_seq_len": recipe.limits.max_context, "kv_cache_config": {"enable_block_reuse": False}}
    return {"backend": "pytorch", "tensor_parallel_size": 1, **batch, **most}


def tree_arguments(
    drafter: HFConfig, recipe: Recipe, *, nodes: int | None = None, max_batch: int | None = None
) -> tuple[dict[str, Any], Policy]:
    """Return the arguments of a tree and its policy; `nodes` and `max_batch` take the place of the recipe's.

    Raises RecipeError if a path is longer than `nodes`, which TensorRT-LLM does not accept.
    """
    depth, max_batch = recipe.tree.depth, max_batch or recipe.limits.max_batch
    if nodes is not None and nodes < depth:
        raise RecipeError(
            "TensorRT-LLM verifies at least a path.", where="nodes", found=nodes, expected=f"{depth} or more"
        )
    most = nodes or max(depth, min(recipe.tree.row_budget, FULL_BATCH_ROWS // max_batch))
    policy = policy_of(recipe, tree_policy(recipe), most)
    total, length = policy.num_nodes - 1, depth - 1
    # of Eagle's growth, which does not run; its validator wants enough for `total`, and 1 would be a chain
    width = max(2, -(-total // length))
    batch = {"max_batch_size": max_batch, "max_num_tokens": max(_MAX_NUM_TOKENS, max_batch * policy.num_nodes)}
    return _sized(recipe, batch) | {
        "speculative_config": {
            "decoding_type": "Eagle3",
            "speculative_model": "drafter_first",
            "use_dynamic_tree": True,
            "max_draft_len": length,
            "max_total_draft_tokens": total,
            "dynamic_tree_max_topK": width,
            "eagle3_layers_to_capture": list(drafter.part("dflash_config").integers("target_layer_ids")),
            "eagle3_model_arch": "llama3",
            "use_rejection_sampling": width <= MOST_SIBLINGS,
        }
    }, policy


def write_tree_arguments(path: Path, bundle: Path, *, nodes: int | None, max_batch: int | None) -> Policy:
    """Write the arguments of a bundle's tree in a size of its own; returns its policy. Raises `D2SDError`."""
    recipe = load_manifest(bundle).recipe
    target = parse_target_config(HFConfig.read(bundle / "target"))
    folder = bundle / "drafter_first"
    if reason := unsupported_reason(recipe, KINDS[read_kind(folder)].read_config(folder), target):
        raise BundleError("TensorRT-LLM cannot serve this bundle.", where=bundle, found=reason)
    drafter = HFConfig.read(folder)
    values, policy = tree_arguments(drafter, recipe, nodes=nodes, max_batch=max_batch)
    write_arguments(path, values, str(policy))
    return policy


def check_llm_args(bundle: Path) -> list[str]:
    """Check the YAML of a bundle, which may have been edited, and return its names. Raises `D2SDError`."""
    folder = bundle / FOLDER
    names = [name for name in (DFLASH, TREE) if (folder / name).is_file()]
    if not names:
        raise BundleError("The bundle has no TensorRT-LLM arguments.", where=folder, fix="build it in bf16 or fp16")
    for name in names:
        text = read_text(folder / name, error=BundleError, what="file of arguments")
        parse_yaml(text, str(folder / name), lines=True)  # it is within bounds, and no key stands twice
        try:
            values = yaml.safe_load(text)  # YAML 1.1, as TensorRT-LLM reads it
        except (yaml.YAMLError, ValueError) as error:
            raise BundleError("Not valid YAML.", where=folder / name, found=error) from None
        if not isinstance(values, dict):
            raise BundleError("Arguments are a mapping of keys.", where=folder / name, found=type(values).__name__)
        speculative_config = check_arguments(values, str(folder / name)).speculative_config
        if speculative_config is None:
            continue
        drafters = [bundle / "drafter_first"]
        if not isinstance(speculative_config, DFlash) and (bundle / "drafter_second").is_dir():
            drafters.append(bundle / "drafter_second")
        limit = max(HFConfig.read(folder).size("block_size") for folder in drafters) - 1
        if not 1 <= (speculative_config.max_draft_len or 0) <= limit:
            raise BundleError(
                "The drafter was not trained for this many draft tokens.",
                where=f"{folder / name}: speculative_config.max_draft_len",
                found=speculative_config.max_draft_len,
                expected=f"1 to {limit}",
            )
    return names
