"""A random model small enough to compile in seconds, for every test that needs a real one."""

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.model import IndexerConfig, MLAConfig, ModelConfig, MoEConfig
from glm_jax.model.transformer import Transformer

VOCAB = 40


def small_config(topk=4):
    """Every size is another, every epsilon and scale far from its default, so that none can be mistaken for another."""
    return ModelConfig(
        vocab_size=VOCAB, hidden_size=16, layers=3, dense_layers=1, intermediate_size=20, heads=3,
        mla=MLAConfig(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, latent_norm_eps=3e-2),
        indexer=IndexerConfig(heads=2, head_dim=8, topk=topk, key_norm_eps=2e-2),
        moe=MoEConfig(experts=5, experts_per_token=2, shared_experts=1, intermediate_size=7, routed_scaling_factor=1.7),
        rope_theta=50.0, rms_norm_eps=1e-2)


def random_model(config, seed=0):
    """A model none of whose weights has a special value: gains differ from 1, biases from 0. Drawn by numpy: nothing to compile."""
    rng = np.random.default_rng(seed)

    def draw(declared):
        centre, scale = {"ones": (1, 0.3), "zeros": (0, 0.2), "normal": (0, declared.scale)}[declared.init]
        return jnp.asarray(centre + scale * rng.normal(size=declared.shape), jnp.float32)

    model = jax.tree.map(draw, Transformer.declare_tree(config))
    return model.replace(embedding=model.embedding / config.initializer_range)
