"""One model of each kind, small, every size a multiple of what a mesh of eight devices may ask for, and no two alike by accident."""

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.model import GQAConfig, IndexerConfig, MLAConfig, ModelConfig, MoEConfig
from glm_jax.model.transformer import Transformer
from glm_jax.parallel import shard, sharding_of

ROWS, LENGTH, VOCAB = 8, 72, 80
_MLA = MLAConfig(q_lora_rank=40, kv_lora_rank=56, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
_MOE = MoEConfig(experts=16, experts_per_token=3, shared_experts=1, intermediate_size=24, routed_scaling_factor=1.3)
_GQA = GQAConfig(kv_heads=4, head_dim=16, rotary_dim=8, qk_norm=True, bias=True)
_SHAPE = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 104, "heads": 8, "rope_theta": 100.0}
CONFIGS = {
    "gqa": ModelConfig(**_SHAPE, layers=2, dense_layers=2, gqa=_GQA),
    "mla": ModelConfig(**_SHAPE, layers=2, dense_layers=2, mla=_MLA),
    "moe": ModelConfig(**_SHAPE, layers=3, dense_layers=1, gqa=_GQA, moe=_MOE),
    # Row length below and above the bound up to which selected keys are not gathered but masked.
    "dsa": ModelConfig(**_SHAPE, layers=5, dense_layers=1, mla=_MLA, indexer=IndexerConfig(heads=2, head_dim=16, topk=9, pattern="FFSFS"),
                       moe=_MOE),
    "dsa_masked": ModelConfig(**_SHAPE, layers=3, dense_layers=1, mla=_MLA,
                              indexer=IndexerConfig(heads=2, head_dim=16, topk=20, pattern="FSF"), moe=_MOE),
}


def random_weights(config, seed=0):
    """The model as numpy arrays."""
    rng = np.random.default_rng(seed)

    def draw(declared):
        centre, scale = {"ones": (1, 0.3), "zeros": (0, 0.1), "normal": (0, declared.scale)}[declared.init]
        return (centre + scale * rng.normal(size=declared.shape)).astype(np.float32)

    model = jax.tree.map(draw, Transformer.declare_tree(config))
    return model.replace(embedding=model.embedding / config.initializer_range)


def placed(config, weights, mesh):
    """The model on the mesh, every weight where it belongs; without a mesh, on one device."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, weights)
    return jax.tree.map(lambda declared, w: jax.device_put(w, sharding_of(declared, mesh)), Transformer.declare_tree(config), weights)


def abstract(config, mesh):
    """The model on the mesh without its numbers."""
    return jax.tree.map(
        lambda declared: jax.ShapeDtypeStruct(declared.shape, jnp.float32, sharding=sharding_of(declared, mesh)),
        Transformer.declare_tree(config))


def packed_rows(seed=0):
    """tokens, segment ids and labels int32 [ROWS, LENGTH], two segments and some padding a row; label -1 is not counted."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    places = np.arange(LENGTH)
    ends = rng.integers(20, 40, ROWS)[:, None], rng.integers(LENGTH - 8, LENGTH + 1, ROWS)[:, None]
    segments = np.where(places < ends[0], 1, np.where(places < ends[1], 2, 0)).astype(np.int32)
    labels = np.full_like(tokens, -1)
    labels[:, :-1] = np.where((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0), tokens[:, 1:], -1)
    return tokens, segments, labels


def loss_of(model, tokens, segments, labels, **arguments):
    """Mean cross entropy, with the indexer's and the router's losses where the model has them; and the forward pass's output."""
    config = model.config
    tokens, segments, labels = (shard(jnp.asarray(a), "batch", "queries") for a in (tokens, segments, labels))
    out = model(tokens, segment_ids=segments, indexer_loss=config.indexer is not None, balance_loss=config.moe is not None,
                return_selections=config.indexer is not None, **arguments)
    logp = jax.nn.log_softmax(out.logits, axis=-1)
    picked = jnp.where(jnp.arange(config.vocab_size) == labels[..., None], logp, 0).sum(axis=-1)
    loss = -picked.sum() / (labels >= 0).sum()
    real = segments != 0
    if config.indexer is not None:
        loss += 0.3 * jnp.where(real, out.indexer_loss, 0).sum() / real.sum()
    if config.moe is not None:
        loss += 0.1 * out.balance_loss.sum() / real.sum()
    return loss, (out.routing, out.selections)
