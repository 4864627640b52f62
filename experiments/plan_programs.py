"""The programs that a plan compiles: the project's own train step, RL update and decode step, with abstract arguments placed on a mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_jax.config import RLConfig
from glm_jax.model import ModelConfig
from glm_jax.model.transformer import Transformer
from glm_jax.parallel import DECODE_RULES, sharding_of, spec, use_rules
from glm_jax.rl.learner import rl_objective
from glm_jax.rollout import programs
from glm_jax.training.objectives import supervised_loss
from glm_jax.training.optimizers import adamw, path_name
from glm_jax.training.step import TrainState, build_update

STAGES = ("pretrain", "rl", "decode")
BALANCE, MTP, BIAS_RATE = 1e-4, 0.3, 1e-3  # GLM-4.5 §2.4


@dataclasses.dataclass(frozen=True)
class Program:
    """What is lowered, and the abstract arrays that it holds by class; `gradients` are among its temporaries, None where it has none."""

    lowered: Any
    held: dict[str, Any]
    gradients: Any = None


def build(
    config: ModelConfig, stage: str, mesh: Mesh, rows: int, sequence: int, *, remat: str = "layer", moments: str = "float32"
) -> Program:
    """Traces and lowers one step of `stage`: rows x sequence tokens, for decoding rows with caches of `sequence` slots."""
    with jax.set_mesh(mesh):
        if stage == "decode":
            with use_rules(DECODE_RULES):
                return _decode(config, mesh, rows, sequence)
        return _update(config, stage, mesh, rows, sequence, remat, moments)


def placed(tree: Any, mesh: Mesh) -> Any:
    """Abstract arrays as jax.eval_shape gives them under the mesh, with shardings that a compiler takes; replicated where none is known."""
    where = lambda s: NamedSharding(mesh, PartitionSpec() if s.sharding is None else s.sharding.spec)
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where(s)), tree)


def abstract_model(config: ModelConfig, mesh: Mesh, dtype: Any) -> Transformer:
    """Every weight as declared; the routers' biases float32 whatever the type."""
    kind = lambda d: jnp.float32 if d.path.endswith("router_bias") else dtype
    return jax.tree.map(
        lambda d: jax.ShapeDtypeStruct(d.shape, kind(d), sharding=sharding_of(d, mesh)), Transformer.declare_tree(config))


def _update(config: ModelConfig, stage: str, mesh: Mesh, rows: int, sequence: int, remat: str, moments: str) -> Program:
    model, computing = abstract_model(config, mesh, jnp.float32), {"remat": remat, "dtype": jnp.bfloat16}
    scalar = lambda dtype=jnp.float32, shape=(): jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    types = {"tokens": jnp.int32, "segment_ids": jnp.int32, "loss_mask": jnp.float32}
    shared, frozen, bias_rate = {"loss_tokens": scalar()}, ("router_bias",), 0.0
    if stage == "rl":
        rl = RLConfig()
        types |= {"behaviour_logp": jnp.float32, "advantages": jnp.float32, "rollout_ids": jnp.int32, "group_ids": jnp.int32}
        objective, frozen = rl_objective(rl, **computing), ("router_bias", "mtp", "indexer")
    else:
        steps = 1 if config.mtp is not None else 0
        objective = functools.partial(
            supervised_loss, dense_attention=False, indexer_coefficient=float(config.indexer is not None),
            balance_coefficient=BALANCE * (config.moe is not None), mtp_coefficient=MTP * steps, mtp_steps=steps,
            count_experts=config.moe is not None, **computing)
        shared |= {"real_tokens": scalar(), "sequences": scalar()} | ({"mtp_tokens": scalar(shape=(steps,))} if steps else {})
        bias_rate = BIAS_RATE * (config.moe is not None)
    shape = (1, rows, sequence)
    split = NamedSharding(mesh, spec((None, "batch", None), shape, mesh))
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=split) for name, dtype in types.items()}
    optimizer = adamw(1e-4, frozen=frozen, moments_dtype=jnp.dtype(moments))
    state = TrainState(step=scalar(jnp.int32), model=model, optimizer=placed(jax.eval_shape(optimizer.init, model), mesh))
    one = {name: jax.ShapeDtypeStruct(shape[1:], s.dtype, sharding=NamedSharding(mesh, spec(("batch", None), shape[1:], mesh)))
           for name, s in batch.items()}
    gradients, _ = jax.eval_shape(jax.grad(objective, has_aux=True), model, one | shared)
    lowered = build_update(objective, optimizer, bias_rate).lower(state, batch, shared, scalar(jnp.int32))
    moments = jax.tree_util.tree_flatten_with_path(state.optimizer)[0]
    of = lambda name: [leaf for path, leaf in moments if f"/{name}/" in f"/{path_name(path)}/"]
    held = {"parameters": model, "first_moments": of("mu"), "second_moments": of("nu"), "batch": batch}
    return Program(lowered, held, placed(gradients, mesh))


def _decode(config: ModelConfig, mesh: Mesh, rows: int, slots: int) -> Program:
    model = abstract_model(dataclasses.replace(config, mtp=None), mesh, jnp.bfloat16)
    state = jax.eval_shape(functools.partial(programs.init_state.__wrapped__, slots=rows, max_length=slots), model)
    by_row = lambda s: jax.ShapeDtypeStruct(
        s.shape, s.dtype, sharding=NamedSharding(mesh, spec(("batch", *(None,) * (s.ndim - 1)), s.shape, mesh)))
    state = jax.tree.map(by_row, dataclasses.replace(state, cache=None)).replace(cache=placed(state.cache, mesh))
    enabled = by_row(jax.ShapeDtypeStruct((rows,), jnp.bool_))
    # Jitted anew: a jitted function keeps the rules that were in force when it was first traced.
    step = jax.jit(programs.decode.__wrapped__, static_argnames=("steps", "record_routing"), donate_argnames=("state",))
    lowered = step.lower(model, state, enabled, steps=1, record_routing=False)
    return Program(lowered, {"parameters": model, "cache": state.cache, "batch": dataclasses.replace(state, cache=None)})


def bytes_per_chip(tree: Any) -> float:
    """Of abstract arrays with shardings."""
    return sum(math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize for s in jax.tree.leaves(tree))


def total_bytes(tree: Any) -> float:
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(tree))


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """What the mathematics of a step asks for, all devices together, however it is computed; and the formula."""

    total: float
    formula: str


def model_flops(config: ModelConfig, stage: str, rows: int, sequence: int) -> ModelFlops:
    """FLOPs of a step without rematerialisation, padding and masked products: the numerator of model FLOP utilisation."""
    decode = stage == "decode"
    active = active_weights(config)
    keys = min(config.indexer.topk, sequence) if config.indexer is not None else sequence
    # Keys that the queries of a row see, summed: all earlier ones up to the selection's width; a decode step's query sees a full cache.
    seen = keys if decode else keys * (keys + 1) // 2 + (sequence - keys) * keys
    scanned = sequence if decode else sequence * (sequence + 1) // 2
    if config.gqa is not None:
        width = 2 * config.gqa.head_dim
    elif decode:
        width = 2 * config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    else:
        width = config.mla.qk_head_dim + config.mla.v_head_dim
    attention = 2 * config.layers * config.heads * width * seen
    index = 2 * len(config.full_layers) * config.indexer.heads * config.indexer.head_dim * scanned if config.indexer is not None else 0
    tokens, passes = (1, 1) if decode else (sequence, 3)
    total = rows * (2 * passes * active * tokens + passes * attention + index)
    count = "2" if decode else "6"
    without = "" if decode or config.mtp is None else ", MTP and the indexers' own gradients left out" if index else ", MTP left out"
    indexed = f" + 2 x {len(config.full_layers)} full layers x index heads x dim x keys scanned" if index else ""
    formula = (
        f"{count} x {active / 1e9:.2f}e9 active weights x {rows * tokens} tokens + {2 * passes} x {config.layers} layers x "
        f"{config.heads} heads x {width} (query-key + value dims) x {rows * seen} query-key pairs{indexed}{without} = {total:.3e}")
    return ModelFlops(float(total), formula)


def active_weights(config: ModelConfig) -> int:
    """Weights that a token is multiplied with: of the experts those chosen; the embedding's lookup, norms, biases and MTP are left out."""
    total = 0
    for declared in Transformer.declare(dataclasses.replace(config, mtp=None)):
        matrix = [axis for axis in declared.axes if not axis.endswith("layers")]
        if len(matrix) < 2 or declared.path.endswith("_bias") or (declared.path == "embedding" and not config.tied_embeddings):
            continue
        chosen = config.moe.experts_per_token / config.moe.experts if matrix[0] == "experts" else 1
        total += round(math.prod(declared.shape) * chosen)
    return total
