"""The program of a model is that of its layer pattern, whatever the number of layers."""

import dataclasses

import jax
import numpy as np
import pytest

from glm_jax.model import GQAConfig, IndexerConfig, MLAConfig, MoEConfig, get_preset, init_model
from glm_jax.model.config import shared_pattern

TOKENS = jax.ShapeDtypeStruct((2, 8), np.int32)
# Found by search for GLM-5 (IndexCache, arXiv 2603.12201): no period.
IRREGULAR = "FFSFSSSFSSFFFSSSFFFSFSSSSSSFFSFFSFFSSFFFFFFSFFFFFSFFSSSSSSFSFFFSFSSSFSFFSFFSSS"


def shaped_like_glm_5_2(layers, pattern):
    """Three dense layers, then experts; widths that cost nothing."""
    return dataclasses.replace(
        get_preset("glm-5.2"), layers=layers, vocab_size=32, hidden_size=16, intermediate_size=16, heads=2, mtp=None,
        mla=MLAConfig(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
        indexer=IndexerConfig(heads=2, head_dim=8, topk=4, pattern=pattern),
        moe=MoEConfig(experts=4, experts_per_token=2, shared_experts=1, intermediate_size=8))


def shaped_like_glm_4_5(layers):
    return dataclasses.replace(
        shaped_like_glm_5_2(layers, ""), mla=None, indexer=None, gqa=GQAConfig(kv_heads=1, head_dim=8, rotary_dim=4))


MODELS = {
    "glm-5.2": lambda layers: shaped_like_glm_5_2(layers, shared_pattern(layers, every=4, offset=3)),
    "irregular": lambda layers: shaped_like_glm_5_2(layers, IRREGULAR[:layers]),
    "glm-5": lambda layers: shaped_like_glm_5_2(layers, ""),
    "glm-4.5": shaped_like_glm_4_5,
}
PROGRAMS = {
    "forward": lambda model, tokens: model(tokens, return_selections=model.config.indexer is not None),
    "gradient": jax.grad(lambda model, tokens: model(tokens).logits.sum()),
    "gradient, remat": jax.grad(lambda model, tokens: model(tokens, remat="layer").logits.sum()),
    "decode": lambda model, tokens: model(tokens, cache=model.init_cache(tokens.shape[0], 16)),
}


def equations(value):
    """How many equations a jaxpr has, with those of the programs inside its equations."""
    if isinstance(value, list | tuple):
        return sum(map(equations, value))
    value = getattr(value, "jaxpr", value)
    if not hasattr(value, "eqns"):
        return 0
    return sum(1 + equations(list(equation.params.values())) for equation in value.eqns)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", MODELS)
def test_78_layers_make_the_program_of_14(kind, program):
    """Equation for equation: layers are scanned, and which of them share a selection is data to the scan.

    What grows is the handing out of experts and selections layer by layer: a slice of the scan's result each, not counted.
    """
    def count(layers):
        model = jax.eval_shape(lambda: init_model(MODELS[kind](layers), jax.random.key(0)))
        jaxpr = jax.make_jaxpr(PROGRAMS[program])(model, TOKENS).jaxpr
        handed_out = sum(equation.primitive.name in ("slice", "squeeze") for equation in jaxpr.eqns)
        return equations(jaxpr) - handed_out

    assert count(78) == count(14) > 100
