"""One decoder layer, and a stack of them run by a scan: compile time is that of one layer, whatever their number."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from glm_jax.model.cache import Context, Selection
from glm_jax.model.config import ModelConfig
from glm_jax.model.gqa import GQA
from glm_jax.model.indexer import Indexer, choose
from glm_jax.model.layers import DenseFFN, rms_norm
from glm_jax.model.mla import MLA, Select
from glm_jax.model.moe import MoE, sequence_balance
from glm_jax.model.parameters import gather, part, weight
from glm_jax.parallel.axes import shard

attention_class = lambda config: MLA if config.mla is not None else GQA
_SAVED = {"layer": ("selection", "experts"), "ffn": ("selection", "experts", "attended")}
REMAT = {"none": None} | {name: jax.checkpoint_policies.save_only_these_names(*names) for name, names in _SAVED.items()}


@struct.dataclass
class DenseLayer:
    attention_norm: Array = weight("embed", init="ones")
    attention: MLA | GQA = part(attention_class)
    ffn_norm: Array = weight("embed", init="ones")
    ffn: DenseFFN = part(lambda config: DenseFFN)


@struct.dataclass
class MoELayer:
    attention_norm: Array = weight("embed", init="ones")
    attention: MLA | GQA = part(attention_class)
    ffn_norm: Array = weight("embed", init="ones")
    moe: MoE = part(lambda config: MoE)


def apply_layer(
    config: ModelConfig, layer: DenseLayer | MoELayer, x: Array, context: Context, select: Select | None, experts: Array | None,
) -> tuple[Array, Context, dict[str, Array]]:
    """One pre-norm layer: x [B, T, D] after it, the context with its keys and its selection, and what was asked for and found."""
    layer = gather(layer)
    h = rms_norm(x, layer.attention_norm, config.rms_norm_eps)
    attend = (config, h, context, select) if config.mla is not None else (config, h, context)
    attended, context, found = layer.attention(*attend)
    x = x + checkpoint_name(attended, "attended")
    h = rms_norm(x, layer.ffn_norm, config.rms_norm_eps)
    if isinstance(layer, DenseLayer):
        return x + layer.ffn(h), context, found
    y, chosen, scores = layer.moe(config, h, experts)
    found["experts"] = chosen
    if context.balance_loss:
        found["balance_loss"] = sequence_balance(config, scores, context.query_segments)
    return x + y, context, found


def run_stack(
    config: ModelConfig, layers: DenseLayer | MoELayer, first: int, count: int, indexers: Indexer | None, x: Array, context: Context,
    experts: Array | None, selections: Array | None, remat: str,
) -> tuple[Array, Context, dict[str, Array]]:
    """Layers first .. first + count - 1 in turn. What they found has a leading layer axis.

    `indexers` are those of the whole model, as are the replayed `selections` [full layers, B, T, k]; `experts` [count, B, T, K] are the
    stack's own. Layers that are all full scan over their indexers; a stack in which some share picks its indexer by number in a cond.
    """
    full = [layer for layer in config.full_layers if first <= layer < first + count]
    numbers = _numbers(config, first, count)
    mixed = len(full) not in (0, count)
    own = lambda tree: tree if tree is None or mixed else jax.tree.map(lambda a: a[_span(config, full)], tree)
    scanned = (None, None) if mixed or not full else (own(indexers), own(selections))

    def body(carry, xs):
        x, context = carry
        layer, number, (indexer, selection), experts = xs
        context = context.replace(**number)
        if mixed:
            select = own_or_shared_selection(config, indexers, selections)
        else:
            select = own_selection(config, indexer, selection) if full else shared_selection
        x, context, found = apply_layer(config, layer, x, context, select, experts)
        return (x, context.replace(layer=0, full=0, share=1.0)), found

    body = rematerialised(body, remat)
    context = context.replace(layer=0, full=0, share=1.0)
    # A loop over few layers costs a CPU more than it saves; on a mesh the time to compile counts.
    unroll = count if count <= 5 and jax.sharding.get_abstract_mesh().empty else 1
    (x, context), found = jax.lax.scan(body, (x, context), (layers, numbers, scanned, experts), unroll=unroll)
    return x, context, found


def rematerialised(function: Callable, remat: str) -> Callable:
    """function, of whose values the backward pass finds those that the policy keeps, and computes the others again."""
    return function if remat == "none" else jax.checkpoint(function, policy=REMAT[remat], prevent_cse=False)


def _span(config: ModelConfig, full: list[int]) -> slice:
    """Where these consecutive full layers' indexers are among all."""
    start = config.full_layers.index(full[0])
    return slice(start, start + len(full))


def _numbers(config: ModelConfig, first: int, count: int) -> dict[str, Array]:
    """Per layer of a stack: its number, that of its indexer, and its share of its source's loss (see Context)."""
    layers = range(first, first + count)
    numbers = {"layer": jnp.arange(first, first + count, dtype=jnp.int32)}
    if config.indexer is not None:
        full = config.full_layers
        served = [config.source_layer(layer) for layer in range(config.layers)]
        numbers["full"] = jnp.array([full.index(layer) if layer in full else len(full) for layer in layers], jnp.int32)
        numbers["share"] = jnp.array([1 / served.count(served[layer]) for layer in layers], jnp.float32)
    return numbers


def own_selection(config: ModelConfig, indexer: Indexer, replay: Array | None) -> Select:
    """The choice of the layer's own indexer."""

    def select(x, q_latent, context):
        q, new_keys, w = gather(indexer).project(config, x, q_latent, context)
        context, (keys,) = context.store(("index_key",), (new_keys,), (None,))
        selection = _named(choose(config, q, keys, w, context, replay))
        return selection, context.replace(selection=selection) if context.keep_selection else context

    return select


def shared_selection(x: Array, q_latent: Array, context: Context) -> tuple[Selection, Context]:
    """The choice of the nearest earlier full layer."""
    return context.selection, context


def own_or_shared_selection(config: ModelConfig, indexers: Indexer, replays: Array | None) -> Select:
    """The choice of the indexer number `context.full` among the stacked ones, or the shared one where that is past their end."""
    count = indexers.k.shape[0]

    def select(x, q_latent, context):
        def own(x, q_latent, context):
            take = lambda stacked: jax.lax.dynamic_index_in_dim(stacked, context.full, keepdims=False)
            q, new_keys, w = gather(jax.tree.map(take, indexers)).project(config, x, q_latent, context)
            replay = None if replays is None else take(replays)
            return choose(config, q, context.index_keys(new_keys), w, context, replay), new_keys

        def shared(x, q_latent, context):
            no_keys = jnp.zeros((*x.shape[:2], config.indexer.head_dim), x.dtype)
            return context.selection, shard(no_keys, "batch", "queries", None)

        # The cache is only read in the branches: written there, a cond would copy it. The scope tells whoever counts the work how often.
        with jax.named_scope(f"expected_share_{count}_of_{config.layers}"):
            selection, new_keys = jax.lax.cond(context.full < count, own, shared, x, q_latent, context)
        context, _ = context.store(("index_key",), (new_keys,), (None,))
        return _named(selection), context.replace(selection=_named(selection))

    return select


def _named(selection: Selection) -> Selection:
    """Its places named, for the rematerialisation policy."""
    return selection.replace(places=jax.tree.map(lambda a: checkpoint_name(a, "selection"), selection.places))
