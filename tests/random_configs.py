"""Random small configurations of every family, for tests of what must hold for all of them."""

import numpy as np

from glm_jax.model import GQAConfig, IndexerConfig, MLAConfig, ModelConfig, MoEConfig

FAMILIES = ("gqa", "dense", "mla", "dsa", "dsa_shared", "dsa_groups")


def random_config(family, seed):
    """dense: GQA without experts, embedding tied or not; mla: without an indexer; dsa_shared: some layers share a selection;
    dsa_groups: DeepSeek-V3.2's half-split indexer rotary and group-limited routing, with or without sharing."""
    rng = np.random.default_rng((FAMILIES.index(family), seed))
    between = lambda low, high: int(rng.integers(low, high + 1))
    either = lambda *options: options[rng.integers(len(options))]
    layers = between(3, 5) if family.startswith("dsa") else between(2, 4)
    groups = family == "dsa_groups"
    experts = 4 * between(2, 3) if groups else between(3, 7)
    moe = MoEConfig(
        experts=experts, experts_per_token=between(1, 3), shared_experts=between(0, 2), intermediate_size=between(5, 9),
        routed_scaling_factor=float(rng.uniform(0.5, 2.5)), norm_topk_prob=bool(rng.random() < 0.7), groups=4 if groups else 1,
        topk_groups=2 if groups else 1)
    parts = {"moe": moe, "dense_layers": between(0, layers - 1)}
    if family in ("gqa", "dense"):
        kv_heads, head_dim = between(1, 3), 2 * between(2, 5)
        heads = kv_heads * between(1, 3)
        parts["gqa"] = GQAConfig(
            kv_heads=kv_heads, head_dim=head_dim, rotary_dim=2 * between(1, head_dim // 2), qk_norm=either(True, False),
            bias=either(True, False))
        if family == "dense":
            parts |= {"moe": None, "dense_layers": layers}
    else:
        rope, heads = 2 * between(1, 3), between(2, 4)
        parts["mla"] = MLAConfig(
            q_lora_rank=between(8, 12), kv_lora_rank=between(8, 12), qk_nope_head_dim=between(4, 8), qk_rope_head_dim=rope,
            v_head_dim=between(4, 8), latent_norm_eps=float(rng.uniform(1e-6, 1e-2)), rope_interleaved=either(True, True, False))
        if family != "mla":
            pattern = "".join(either("F", "S", "S") for _ in range(layers - 1))
            shares = family == "dsa_shared" or groups and either(True, False)
            parts["indexer"] = IndexerConfig(
                heads=between(1, 3), head_dim=rope + between(0, 6), topk=between(2, 5), rope_interleaved=not groups,
                pattern="F" + (pattern if "S" in pattern else "S" + pattern[1:]) if shares else "")
    return ModelConfig(
        vocab_size=between(20, 40), hidden_size=between(12, 20), layers=layers, intermediate_size=between(10, 20), heads=heads,
        rope_theta=float(rng.uniform(20, 200)), rms_norm_eps=float(rng.uniform(1e-6, 1e-2)), tied_embeddings=either(True, False), **parts)
