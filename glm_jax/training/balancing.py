"""Experts kept evenly loaded without a loss: their biases move against the load (arXiv 2408.15664; GLM-4.5 §2.4, rate 1e-3)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from glm_jax.model import Transformer
from glm_jax.model.transformer import Output


def expert_load(experts: Array, real: Array, count: int) -> Array:
    """How many real tokens chose each of `count` experts: experts int32 [..., B, T, K], real bool [..., B, T] -> int32 [..., count]."""
    chosen = (experts[..., None] == jnp.arange(count)) & real[..., None, None]
    return chosen.sum(axis=(-4, -3, -2), dtype=jnp.int32)


def expert_loads(model: Transformer, out: Output, segment_ids: Array) -> dict[str, Array]:
    """Metrics `expert_load` int32 [MoE layers, E] and, where the MTP module has experts and ran, `mtp_expert_load` [1, E], over its steps.

    Counts, to be added up over microbatches. An MTP step counts only the entries that have their token.
    """
    count = model.config.moe.experts
    loads = {}
    if out.routing:
        loads["expert_load"] = expert_load(jnp.stack(list(out.routing.values())), segment_ids != 0, count)
    if out.mtp is not None:
        loads["mtp_expert_load"] = expert_load(out.mtp.experts, out.mtp.real, count).sum(axis=0, keepdims=True)
    return loads


def moved_bias(bias: Array, load: Array, rate: float) -> Array:
    """b + rate * sign(mean load - load), float32 [..., E] (arXiv 2408.15664, algorithm 1).

    Exact for loads int32 [..., E] that add up to less than 2^31: the bias of an expert whose load is the mean stays as it is.
    """
    mean, rest = jnp.divmod(load.sum(axis=-1, keepdims=True, dtype=jnp.int32), load.shape[-1])
    direction = jnp.where(load == mean, jnp.sign(rest), jnp.sign(mean - load))
    return bias + jnp.float32(rate) * direction


def balanced(model: Transformer, loads: dict[str, Array], rate: float) -> Transformer:
    """The model with every router's bias moved by `rate` against the loads that `expert_loads` counted over the update.

    Raises ValueError where no loads were counted.
    """
    if not loads.keys() & {"expert_load", "mtp_expert_load"}:
        raise ValueError("a bias rate needs an objective that counts the experts' loads (count_experts=True) and a model that has experts")
    moved = lambda layer, load: layer.replace(moe=layer.moe.replace(router_bias=moved_bias(layer.moe.router_bias, load, rate)))
    if "expert_load" in loads:
        model = model.replace(moe_layers=moved(model.moe_layers, loads["expert_load"]))
    if "mtp_expert_load" in loads:
        model = model.replace(mtp=model.mtp.replace(layer=moved(model.mtp.layer, loads["mtp_expert_load"])))
    return model


def load_violation(load: np.ndarray) -> float:
    """max load / mean load - 1 over the experts of a layer, the mean over layers: MaxVio of arXiv 2408.15664. `load` [layers, E]."""
    load = np.asarray(load, np.float64)
    return float(np.mean(load.max(axis=-1) / np.maximum(load.mean(axis=-1), 1 / load.shape[-1]) - 1))
