"""The two compiled programs of the engine. Their shapes depend on EngineConfig alone, so each compiles once.

S slots, R rows of a prefill batch, C tokens of a prefill chunk, N decode steps, m MoE layers, l layers.
The state is donated from dispatch to dispatch: only the engine's thread may hold it. The model is never donated.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.parallel.axes import island
from glm_jax.rollout.sampling import MAX_STOP_IDS, sample


@flax.struct.dataclass
class SlotState:
    """What the device keeps for each slot between dispatches; `cache.lengths` counts the tokens fed."""

    cache: Any
    token: jax.Array  # int32 [S]       sampled, not yet fed
    active: jax.Array  # bool [S]       decoding
    remaining: jax.Array  # int32 [S]   tokens the request may still sample
    seed: jax.Array  # uint32 [S, 2]
    temperature: jax.Array  # float32 [S]
    stop_ids: jax.Array  # int32 [S, MAX_STOP_IDS], -1 padding


def prefill_row_dtype(chunk: int) -> np.dtype:
    """One row of a prefill batch. Every field is 4 bytes wide, so that a batch crosses to the device as one int32 array."""
    return np.dtype(
        [
            ("slot", np.int32),  # S marks an unused row
            ("start", np.int32),  # tokens already in the cache
            ("count", np.int32),  # real tokens of this chunk
            ("sample", np.int32),  # 1: the prompt ends here, sample its first token
            ("budget", np.int32),  # tokens the request may sample
            ("seed", np.uint32, 2),
            ("temperature", np.float32),
            ("stop_ids", np.int32, MAX_STOP_IDS),
            ("tokens", np.int32, chunk),
        ]
    )


def _unpack(packed: jax.Array, dtype: np.dtype) -> dict[str, jax.Array]:
    fields = {}
    for name, (field, offset) in dtype.fields.items():
        column = packed[:, offset // 4] if field.shape == () else packed[:, offset // 4 : (offset + field.itemsize) // 4]
        fields[name] = jax.lax.bitcast_convert_type(column, field.base)
    return fields


@functools.partial(jax.jit, static_argnames=("slots", "max_length"))
def init_state(model, *, slots: int, max_length: int) -> SlotState:
    """Empty state, on the model's devices."""
    return SlotState(
        cache=model.init_cache(slots, max_length),
        token=jnp.zeros(slots, jnp.int32),
        active=jnp.zeros(slots, bool),
        remaining=jnp.zeros(slots, jnp.int32),
        seed=jnp.zeros((slots, 2), jnp.uint32),
        temperature=jnp.zeros(slots, jnp.float32),
        stop_ids=jnp.full((slots, MAX_STOP_IDS), -1, jnp.int32),
    )


def _slot_axis(leaf) -> int:
    """Leaves of the cache are [layers, S, positions, …], all others [S] or [S, n]."""
    return 1 if leaf.ndim > 2 else 0


def _take(leaf, slots_R):
    """Rows of a leaf; the out-of-range slot of an unused row reads some slot's."""
    return jnp.take(leaf, slots_R, axis=_slot_axis(leaf), mode="clip")


def _put(leaf, slots_R, rows):
    """Writes rows back; the out-of-range slot of an unused row (S, never negative, which would wrap) writes nothing."""
    index = (slice(None),) * _slot_axis(leaf) + (slots_R,)
    return leaf.at[index].set(rows, mode="drop")


def _sample(logits, seed, position, temperature):
    """`sample`, on a mesh by each device for its own rows."""
    rows, table = ("batch",), ("batch", None)
    return island(sample, (table, table, rows, rows), (rows, rows))(logits, seed, position, temperature)


def _is_stop(token_B, stop_ids):
    return (token_B[:, None] == stop_ids).any(axis=-1)


def _routing(out, record: bool):
    """(experts int16 [m, B, T, K] or None, selections int16 [l, B, T, k] or None): the model's {layer: …} in the order of layers."""

    def stack(parts, dtype):
        return jnp.stack([parts[layer] for layer in sorted(parts)]).astype(dtype) if record and parts else None

    return stack(out.routing, jnp.int16), stack(out.selections, jnp.int16)


@functools.partial(jax.jit, static_argnames=("chunk", "record_routing"), donate_argnames=("state",))
def prefill(model, state: SlotState, packed: jax.Array, *, chunk: int, record_routing: bool):
    """Feeds one chunk of R prompts and samples the first token of those that end in it.

    packed int32 [R, …] holds rows of `prefill_row_dtype(chunk)`.
    Returns (state, int32 [3, R] = token, logp as bits, still active; routing of the R x C fed positions).
    """
    rows = _unpack(packed, prefill_row_dtype(chunk))
    slots_R, count_R = rows["slot"], rows["count"]
    mask_RxC = (jnp.arange(chunk) < count_R[:, None]).astype(jnp.int32)
    # The host's `start` rules over the device's length: a slot changes owner, or is rolled back by a cancellation, without a dispatch.
    cache = jax.tree.map(lambda leaf: _take(leaf, slots_R), state.cache).replace(lengths=rows["start"])
    out = model(rows["tokens"], cache=cache, attention_mask=mask_RxC, compute_logits=False, return_selections=record_routing)
    last_R = jnp.maximum(count_R - 1, 0)
    hidden_RxD = jnp.take_along_axis(out.hidden, last_R[:, None, None], axis=1)[:, 0]
    position_R = rows["start"] + count_R
    token_R, logp_R = _sample(model.logits(hidden_RxD), rows["seed"], position_R, rows["temperature"])
    remaining_R = rows["budget"] - 1
    active_R = (rows["sample"] == 1) & (remaining_R > 0) & ~_is_stop(token_R, rows["stop_ids"])
    updated = SlotState(
        cache=out.cache,
        token=token_R,
        active=active_R,
        remaining=remaining_R,
        seed=rows["seed"],
        temperature=rows["temperature"],
        stop_ids=rows["stop_ids"],
    )
    state = jax.tree.map(lambda leaf, new: _put(leaf, slots_R, new), state, updated)
    result = jnp.stack([token_R, jax.lax.bitcast_convert_type(logp_R, jnp.int32), active_R.astype(jnp.int32)])
    return state, result, _routing(out, record_routing)


@functools.partial(jax.jit, static_argnames=("steps", "record_routing"), donate_argnames=("state",))
def decode(model, state: SlotState, enabled_S: jax.Array, *, steps: int, record_routing: bool):
    """N steps for every active slot. A step feeds the slot's token and samples the next.

    enabled bool [S]: False switches a slot off (its request was cancelled).
    Returns (state, int32 [2 N + 1, S] = tokens (-1: the slot was idle in that step), logp as bits, still active;
    routing [N, layers, S, 1, …]).
    """

    def step(state, _):
        fed_S = state.active
        mask_Sx1 = fed_S[:, None].astype(jnp.int32)
        out = model(state.token[:, None], cache=state.cache, attention_mask=mask_Sx1, return_selections=record_routing)
        token_S, logp_S = _sample(out.logits[:, 0], state.seed, out.cache.lengths, state.temperature)
        remaining_S = state.remaining - fed_S
        state = state.replace(
            cache=out.cache,
            token=jnp.where(fed_S, token_S, state.token),
            active=fed_S & (remaining_S > 0) & ~_is_stop(token_S, state.stop_ids),
            remaining=remaining_S,
        )
        return state, (jnp.where(fed_S, token_S, -1), logp_S, _routing(out, record_routing))

    state = state.replace(active=state.active & enabled_S)
    state, (token_NxS, logp_NxS, routing) = jax.lax.scan(step, state, length=steps)
    result = jnp.concatenate([token_NxS, jax.lax.bitcast_convert_type(logp_NxS, jnp.int32), state.active[None].astype(jnp.int32)])
    return state, result, routing
