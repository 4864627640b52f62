"""The forward pass of one row, written from the equations in plain float64 numpy: one query at a time, MLA expanded, no cache.

GLM-5 (arXiv 2602.15763) §2: multi-head latent attention over the keys that the lightning indexer picks, sigmoid router with a
selection-only bias; GLM-4.5 (arXiv 2508.06471) §2: grouped-query attention. MLA's rotary embedding turns the pairs (2i, 2i+1) in place.
Multi-token prediction and the sequence-wise balance loss are those of DeepSeek-V3 (arXiv 2412.19437) §2.1.2 and §2.2.
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


def softmax(x):
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def attention(config, w, index, x, positions, segments, earlier=None):
    """x [T, D] after the layer's norm -> output [T, D], the selected places of every query, KL(attention || softmax(score)) on them [T],
    and (keys, scores of the selected places), which a later step of multi-token prediction may attend with in place of its own."""
    mla, indexer, theta = config.mla, config.indexer, config.rope_theta
    nope, rope, rank = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.kv_lora_rank
    q_latent = rms_norm(x @ w["q_down"], w["q_norm"], mla.latent_norm_eps)
    if earlier is None:
        kv = x @ w["kv_down"]
        latent = rms_norm(kv[:, :rank], w["kv_norm"], mla.latent_norm_eps)
        key_rope = np.stack([rotate(kv[t, rank:], positions[t], theta) for t in range(len(x))])
        keys = np.einsum("sc,hnc->shn", latent, w["k_up"]), key_rope, np.einsum("sc,hcv->shv", latent, w["v_up"])
        scores = [index_scores(config, index, x, q_latent, t, positions, segments) for t in range(len(x))]
    else:
        keys, scores = earlier
    key_nope, key_rope, value = keys

    out, selected, kl = np.zeros_like(x), [], np.zeros(len(x))
    for t in range(len(x)):
        chosen = sorted(scores[t])
        selected.append(chosen)
        if not chosen:
            continue
        mean_p = np.zeros(len(chosen))
        for h in range(config.heads):
            query = q_latent[t] @ w["q_up"][:, h]
            query_rope = rotate(query[nope:], positions[t], theta)
            p = softmax(np.array([query[:nope] @ key_nope[s, h] + query_rope @ key_rope[s] for s in chosen]) * (nope + rope) ** -0.5)
            out[t] += p @ value[chosen, h] @ w["out"][h]
            mean_p += p / config.heads
        if indexer is not None:
            kl[t] = np.sum(mean_p * np.log(mean_p / softmax(np.array([scores[t][s] for s in chosen]))))
    return out, selected, kl, (keys, scores)


def index_scores(config, index, x, q_latent, t, positions, segments):
    """{place: score} of the indexer.topk visible places with the highest scores, the lower place of equals; of all without an indexer."""
    visible = [s for s in range(t + 1) if segments[s] == segments[t] != 0]
    if config.indexer is None:
        return dict.fromkeys(visible)
    indexer, rope = config.indexer, config.mla.qk_rope_head_dim
    turn = lambda v, s: np.concatenate([rotate(v[..., :rope], positions[s], config.rope_theta), v[..., rope:]], axis=-1)
    query = turn(np.einsum("l,lhd->hd", q_latent[t], index["q_up"]), t)
    head_weights = (x[t] @ index["head_weights"]) * indexer.heads**-0.5
    score = {}
    for s in visible:
        key = turn(layer_norm(x[s] @ index["k"], index["k_norm_gain"], index["k_norm_bias"], indexer.key_norm_eps), s)
        score[s] = np.sum(head_weights * np.maximum(query @ key * indexer.head_dim**-0.5, 0))
    return {s: score[s] for s in sorted(visible, key=lambda s: (-score[s], s))[: indexer.topk]}


def grouped_attention(config, w, x, positions, segments):
    """x [T, D] after the layer's norm -> output [T, D]. The pairs (i, i + rotary_dim/2) of a head's first dims are turned."""
    gqa, half = config.gqa, config.gqa.rotary_dim // 2

    def project(name, t):
        head = np.einsum("d,d...->...", x[t], w[name]) + (0 if w[f"{name}_bias"] is None else w[f"{name}_bias"])
        if name == "v":
            return head
        if gqa.qk_norm:
            head = rms_norm(head, w[f"{name}_norm"], config.rms_norm_eps)
        turned = head.copy()
        for i in range(half):
            pair = rotate(head[..., [i, i + half]], positions[t] * config.rope_theta ** (-i / half), config.rope_theta)
            turned[..., i], turned[..., i + half] = pair[..., 0], pair[..., 1]
        return turned

    out = np.zeros_like(x)
    for t in range(len(x)):
        visible = [s for s in range(t + 1) if segments[s] == segments[t] != 0]
        if not visible:
            continue
        query, keys, values = project("q", t), [project("k", s) for s in visible], [project("v", s) for s in visible]
        for h in range(config.heads):
            g, q = divmod(h, config.heads // gqa.kv_heads)
            p = softmax(np.array([query[g, q] @ key[g] for key in keys]) * gqa.head_dim**-0.5)
            out[t] += sum(p_s * value[g] for p_s, value in zip(p, values, strict=True)) @ w["out"][g, q]
    return out


def mixture(config, w, x):
    """x [T, D] -> output [T, D], experts [T, K] by falling biased score, scores [T, E]."""
    moe = config.moe
    out, experts = swiglu(x, w["shared_gate"], w["shared_up"], w["shared_down"]), []
    scores = sigmoid(x @ w["router"])
    for t in range(len(x)):
        chosen = np.argsort(-(scores[t] + w["router_bias"]), kind="stable")[: moe.experts_per_token]
        gates = scores[t, chosen] / (scores[t, chosen].sum() if moe.norm_topk_prob else 1) * moe.routed_scaling_factor
        for gate, e in zip(gates, chosen, strict=True):
            out[t] += gate * swiglu(x[t], w["gate_up"][e][:, 0], w["gate_up"][e][:, 1], w["down"][e])
        experts.append(chosen)
    return out, np.array(experts), scores


def sequence_balance(config, scores):
    """sum_i f_i P_i of one sequence's scores [T, E] in one layer (DeepSeek-V3 eq. 17-20, without the coefficient)."""
    length, experts = scores.shape
    top = [set(np.argsort(-scores[t], kind="stable")[: config.moe.experts_per_token]) for t in range(length)]
    total = 0.0
    for i in range(experts):
        f = experts / (config.moe.experts_per_token * length) * sum(i in top[t] for t in range(length))
        total += f * sum(scores[t, i] / scores[t].sum() for t in range(length)) / length
    return total


class Layer(NamedTuple):
    x: np.ndarray
    selected: list | None
    kl: np.ndarray | float
    attended_with: tuple | None
    experts: np.ndarray | None
    scores: np.ndarray | None


def layer(config, w, index, x, positions, segments, earlier=None):
    h, found = rms_norm(x, w["attention_norm"], config.rms_norm_eps), (None, 0.0, None)
    if config.mla is not None:
        attended, *found = attention(config, w["attention"], index, h, positions, segments, earlier)
    else:
        attended = grouped_attention(config, w["attention"], h, positions, segments)
    x = x + attended
    h = rms_norm(x, w["ffn_norm"], config.rms_norm_eps)
    if "ffn" in w:
        return Layer(x + swiglu(h, *(w["ffn"][name] for name in ("gate", "up", "down"))), *found, None, None)
    y, experts, scores = mixture(config, w["moe"], h)
    return Layer(x + y, *found, experts, scores)


def to_numpy(tree):
    """Nested dictionaries of float64 arrays for nested dataclasses of weights."""
    if tree is None or not hasattr(tree, "__dataclass_fields__"):
        return None if tree is None else np.asarray(tree, np.float64)
    return {name: to_numpy(value) for name, value in vars(tree).items()}


def pick(weights, layer):
    if isinstance(weights, dict):
        return {name: pick(value, layer) for name, value in weights.items()}
    return None if weights is None else weights[layer]


class Oracle(NamedTuple):
    logits: np.ndarray  # [T, V]
    selections: dict  # {layer: T lists of places}
    routing: dict  # {layer: [T, K]}
    indexer_kl: np.ndarray  # [T], summed over layers
    scores: dict  # {layer: [T, E]} of the router
    hidden: np.ndarray  # [T, D] after the final norm


def forward(model, tokens, segments=None, config=None):
    """The pass over tokens [T]; segment 0 is padding. `config` takes the place of the model's own."""
    config = config or model.config
    segments = np.ones(len(tokens), int) if segments is None else np.asarray(segments)
    positions = [int(np.sum(segments[:t] == segments[t])) for t in range(len(tokens))]
    dense, sparse, indexers = to_numpy(model.dense_layers), to_numpy(model.moe_layers), to_numpy(model.indexer)
    x = np.asarray(model.embedding, np.float64)[np.asarray(tokens)]
    found = {}
    for number in range(config.layers):
        w = pick(dense, number) if number < config.dense_layers else pick(sparse, number - config.dense_layers)
        found[number] = layer(config, w, pick(indexers, number), x, positions, segments)
        x = found[number].x
    hidden = rms_norm(x, np.asarray(model.final_norm, np.float64), config.rms_norm_eps)
    of = lambda name: {number: getattr(value, name) for number, value in found.items() if getattr(value, name) is not None}
    return Oracle(hidden @ np.asarray(model.head, np.float64), of("selected"), of("experts"), sum(of("kl").values()), of("scores"), hidden)


class Step(NamedTuple):
    logits: np.ndarray  # [T - k - 1, V]: row t predicts token t + k + 2
    experts: np.ndarray | None
    scores: np.ndarray | None
    indexer_kl: np.ndarray | float


def multi_token_prediction(model, tokens, steps):
    """The steps k = 0 .. n-1 over one sequence, tokens [T] (DeepSeek-V3 eq. 21-23): step k has the T - k - 1 entries whose token t + k + 1
    there is, and the same weights as every other."""
    config, mtp = model.config, model.mtp
    embedding, head = (np.asarray(own[0] if own is not None else shared, np.float64)
                       for own, shared in ((mtp.embedding, model.embedding), (mtp.head, model.head)))
    w = pick({name: to_numpy(value) for name, value in vars(mtp).items()}, 0)
    hidden, found, earlier = forward(model, tokens).hidden, [], None
    for k in range(steps):
        entries = len(tokens) - k - 1
        both = np.concatenate([
            rms_norm(embedding[np.asarray(tokens)[k + 1:]], w["embedding_norm"], config.rms_norm_eps),
            rms_norm(hidden[:entries], w["hidden_norm"], config.rms_norm_eps)], axis=1)
        x = both @ np.concatenate([w["project"][0], w["project"][1]])
        one = layer(config, w["layer"], w["indexer"], x, range(entries), np.ones(entries, int), earlier)
        if config.mtp.share_selection and k == 0:
            earlier = one.attended_with
        normed = rms_norm(one.x, w["final_norm"], config.rms_norm_eps)
        found.append(Step(normed @ head, one.experts, one.scores, one.kl))
        hidden = normed if config.mtp.recycle == "post_norm" else one.x
    return found
