"""The GLM-5 forward pass of one row, written from its equations in plain float64 numpy: one query at a time, MLA expanded, no cache.

GLM-5 (arXiv 2602.15763) §2: multi-head latent attention over the keys that the lightning indexer picks, sigmoid router with a
selection-only bias. Rotary embedding here turns the pairs (2i, 2i+1) in place.
"""

from typing import NamedTuple

import numpy as np


def rms_norm(x, gain, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def layer_norm(x, gain, bias, eps):
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + eps) * gain + bias


def rotate(x, position, theta):
    """x [..., d]: the pair i turned by position * theta^(-2i/d)."""
    out, dim = np.empty_like(x), x.shape[-1]
    for i in range(dim // 2):
        angle = position * theta ** (-2 * i / dim)
        a, b = x[..., 2 * i], x[..., 2 * i + 1]
        out[..., 2 * i] = a * np.cos(angle) - b * np.sin(angle)
        out[..., 2 * i + 1] = a * np.sin(angle) + b * np.cos(angle)
    return out


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def swiglu(x, gate, up, down):
    return ((x @ gate) * sigmoid(x @ gate) * (x @ up)) @ down


def attention(config, w, x, positions, segments):
    """x [T, D] after the layer's norm -> output [T, D], the selected places of every query, KL(attention || softmax(score)) on them [T]."""
    mla, indexer, theta = config.mla, config.indexer, config.rope_theta
    nope, rope, rank = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.kv_lora_rank
    q_latent = rms_norm(x @ w["q_down"], w["q_norm"], mla.latent_norm_eps)
    kv = x @ w["kv_down"]
    latent = rms_norm(kv[:, :rank], w["kv_norm"], mla.latent_norm_eps)
    key_rope = np.stack([rotate(kv[t, rank:], positions[t], theta) for t in range(len(x))])
    key_nope, value = np.einsum("sc,hnc->shn", latent, w["k_up"]), np.einsum("sc,hcv->shv", latent, w["v_up"])

    index = w["indexer"]
    index_key = layer_norm(x @ index["k"], index["k_norm_gain"], index["k_norm_bias"], indexer.key_norm_eps)
    for t in range(len(x)):
        index_key[t, :rope] = rotate(index_key[t, :rope], positions[t], theta)

    out, selected, kl = np.zeros_like(x), [], np.zeros(len(x))
    for t in range(len(x)):
        visible = [s for s in range(t + 1) if segments[s] == segments[t] != 0]
        index_query = np.einsum("l,lhd->hd", q_latent[t], index["q_up"])
        index_query[:, :rope] = rotate(index_query[:, :rope], positions[t], theta)
        head_weights = (x[t] @ index["head_weights"]) * indexer.heads**-0.5
        score = {s: np.sum(head_weights * np.maximum(index_query @ index_key[s] * indexer.head_dim**-0.5, 0)) for s in visible}
        chosen = sorted(sorted(visible, key=lambda s: (-score[s], s))[: indexer.topk])
        selected.append(chosen)
        if not chosen:
            continue
        mean_p = np.zeros(len(chosen))
        for h in range(config.heads):
            query = q_latent[t] @ w["q_up"][:, h]
            query_rope = rotate(query[nope:], positions[t], theta)
            logits = np.array([query[:nope] @ key_nope[s, h] + query_rope @ key_rope[s] for s in chosen]) * (nope + rope) ** -0.5
            p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            out[t] += p @ value[chosen, h] @ w["out"][h]
            mean_p += p / config.heads
        q = np.exp([score[s] for s in chosen])
        kl[t] = np.sum(mean_p * np.log(mean_p / (q / q.sum())))
    return out, selected, kl


def mixture(config, w, x):
    """x [T, D] -> output [T, D], experts [T, K] by falling biased score."""
    moe = config.moe
    out, experts = swiglu(x, w["shared_gate"], w["shared_up"], w["shared_down"]), []
    for t in range(len(x)):
        scores = sigmoid(x[t] @ w["router"])
        chosen = np.argsort(-(scores + w["router_bias"]), kind="stable")[: moe.experts_per_token]
        gates = scores[chosen] / (scores[chosen].sum() if moe.norm_topk_prob else 1) * moe.routed_scaling_factor
        for gate, e in zip(gates, chosen, strict=True):
            width = moe.intermediate_size
            out[t] += gate * swiglu(x[t], w["gate_up"][e][:, :width], w["gate_up"][e][:, width:], w["down"][e])
        experts.append(chosen)
    return out, np.array(experts)


def to_numpy(tree):
    """Nested dictionaries of float64 arrays for nested dataclasses of weights."""
    return {k: to_numpy(v) if hasattr(v, "__dataclass_fields__") else np.asarray(v, np.float64) for k, v in vars(tree).items()}


def pick(weights, layer):
    return {k: pick(v, layer) if isinstance(v, dict) else v[layer] for k, v in weights.items()}


class Oracle(NamedTuple):
    logits: np.ndarray  # [T, V]
    selections: dict  # {layer: T lists of places}
    routing: dict  # {layer: [T, K]}
    indexer_kl: np.ndarray  # [T], summed over layers


def forward(model, tokens, segments=None, config=None):
    """The pass over tokens [T]; segment 0 is padding. `config` takes the place of the model's own."""
    config = config or model.config
    segments = np.ones(len(tokens), int) if segments is None else np.asarray(segments)
    positions = [int(np.sum(segments[:t] == segments[t])) for t in range(len(tokens))]
    dense, sparse = to_numpy(model.dense_layers), to_numpy(model.moe_layers)
    x = np.asarray(model.embedding, np.float64)[np.asarray(tokens)]
    selections, routing, indexer_kl = {}, {}, np.zeros(len(tokens))
    for layer in range(config.layers):
        is_dense = layer < config.dense_layers
        w = pick(dense, layer) if is_dense else pick(sparse, layer - config.dense_layers)
        attended, selections[layer], kl = attention(
            config, w["attention"], rms_norm(x, w["attention_norm"], config.rms_norm_eps), positions, segments)
        indexer_kl += kl
        x = x + attended
        h = rms_norm(x, w["ffn_norm"], config.rms_norm_eps)
        if is_dense:
            x = x + swiglu(h, *(w["ffn"][name] for name in ("gate", "up", "down")))
        else:
            y, routing[layer] = mixture(config, w["moe"], h)
            x = x + y
    final_norm, head = np.asarray(model.final_norm, np.float64), np.asarray(model.head, np.float64)
    return Oracle(rms_norm(x, final_norm, config.rms_norm_eps) @ head, selections, routing, indexer_kl)
