"""How far the trainer's log-probabilities are from the engine's, and why: the importance ratio before any update.

Engine and trainer compute the same function in another order. In float32 that moves a log-probability by about 1e-6, unless it tips a
discrete choice: which experts a token goes to, or which keys a query reads. Then the two are different functions from that token on.
Replaying the recorded choices removes exactly those differences (GLM-5, arXiv 2602.15763, §3.2; routing replay, arXiv 2510.11370).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.data.packing import PackedBatch
from glm_jax.model import Replay, Transformer
from glm_jax.training.scoring import token_logp


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Of R packed rows of T tokens; entry t scores token t, and means something where `trained`.

    trained         bool [R, T]     the policy sampled the token
    ratio           float32 [R, T]  exp(trainer's log-prob − engine's), the trainer choosing experts and keys itself
    ratio_replayed  float32 [R, T]  the same with the engine's experts and selections
    flipped         bool [R, T]     the trainer's own choice differed from the engine's, in some layer, at an earlier token of the segment
    flips           {"experts", "selections"}: (layer, token) places where the choice differed
    places          {"experts", "selections"}: (layer, token) places with a recorded choice
    """

    trained: np.ndarray
    ratio: np.ndarray
    ratio_replayed: np.ndarray
    flipped: np.ndarray
    flips: dict[str, int]
    places: dict[str, int]


def measure_mismatch(model: Transformer, rows: PackedBatch, temperature: float = 1.0) -> Mismatch:
    """Scores rows with recorded routing by the model that sampled them. `temperature`: of the sampling, above 0.

    Raises ValueError for rows without recorded experts and selections.
    """
    if rows.experts is None or rows.selections is None:
        raise ValueError("rows without recorded experts and selections: sample with EngineConfig(record_routing=True)")
    recorded = {"experts": np.moveaxis(rows.experts, 2, 0), "selections": np.moveaxis(rows.selections, 2, 0)}
    logp, logp_replayed, chosen = jax.device_get(_score(model, rows.tokens, rows.segment_ids, Replay(**recorded), temperature))
    differs = {}
    for name, engine in recorded.items():
        trainer = chosen[name][..., : engine.shape[-1]]
        padded = np.full(engine.shape, -1, np.int32)  # a row shorter than index_topk has narrower selections
        padded[..., : trainer.shape[-1]] = trainer
        differs[name] = (engine[..., 0] >= 0) & (np.sort(engine, axis=-1) != np.sort(padded, axis=-1)).any(axis=-1)
    trained = rows.loss_mask > 0
    ratio = lambda logp: np.where(trained, np.exp(logp - rows.behaviour_logp), 1).astype(np.float32)
    return Mismatch(
        trained, ratio(logp), ratio(logp_replayed), _seen_earlier(np.any([d.any(axis=0) for d in differs.values()], axis=0), rows),
        flips={name: int(d.sum()) for name, d in differs.items()},
        places={name: int((engine[..., 0] >= 0).sum()) for name, engine in recorded.items()})


@functools.partial(jax.jit, static_argnames="temperature")
def _score(model, tokens_RxT, segment_ids_RxT, replay, temperature):
    own = model(tokens_RxT, segment_ids=segment_ids_RxT, return_selections=True, compute_logits=False)
    replayed = model(tokens_RxT, segment_ids=segment_ids_RxT, replay=replay, compute_logits=False)
    chosen = {"experts": jnp.stack(list(own.routing.values())), "selections": jnp.stack(list(own.selections.values()))}
    logp = lambda out: token_logp(out.hidden, model.unembedding, tokens_RxT, temperature)
    return logp(own), logp(replayed), chosen


def _seen_earlier(flip_RxT: np.ndarray, rows: PackedBatch) -> np.ndarray:
    """bool [R, T]: a flip at an earlier token of the same segment. Positions count from 0 in each, so a segment starts `positions` back."""
    before = np.pad(np.cumsum(flip_RxT, axis=1), ((0, 0), (1, 0)))[:, :-1]  # flips in the row before each token
    starts = np.arange(flip_RxT.shape[1]) - rows.positions
    return (before > np.take_along_axis(before, starts, axis=1)) & (rows.segment_ids > 0)
