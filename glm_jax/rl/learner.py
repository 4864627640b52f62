"""The consumer: leases the oldest whole groups, turns them into one batch of rows, runs one jitted update, publishes the weights."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import PartitionSpec, reshard

from glm_jax.config import RLConfig
from glm_jax.data.packing import pack_segments
from glm_jax.data.trajectory import Trajectory
from glm_jax.model import Replay, Transformer
from glm_jax.rl.actors import PromptQueue
from glm_jax.rl.advantages import group_advantages
from glm_jax.rl.groups import fill_group, is_valid
from glm_jax.rl.losses import policy_loss
from glm_jax.rl.ring import Ticket, TrajectoryRing
from glm_jax.rl.staleness import Admission, is_stale
from glm_jax.training.scoring import token_logp
from glm_jax.training.step import build_update


def rl_objective(config: RLConfig, remat: str = "none", dtype: Any = None) -> Callable:
    """The objective of one microbatch for build_update: policy loss on the sampled tokens; where routing was recorded, its mismatch.

    Reads tokens, segment_ids, loss_mask, behaviour_logp, advantages, rollout_ids, group_ids [B, T], optionally experts
    [B, T, MoE layers, K] and selections [B, T, layers, k], and the scalar loss_tokens of the whole update. `remat` is the model's; `dtype`
    is the type to compute in, by default that of the weights, which gradients have.
    """
    hyper = {"eps_low": config.eps_low, "eps_high": config.eps_high}

    def objective(model: Transformer, batch: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        if dtype is not None:
            model = model.astype(dtype)
        recorded = {name: jnp.moveaxis(batch[name], 2, 0) for name in ("experts", "selections") if name in batch}
        replay = None
        if config.replay != "none":
            replay = Replay(recorded["experts"], recorded["selections"] if config.replay == "all" else None)
        out = model(
            batch["tokens"], segment_ids=batch["segment_ids"], replay=replay, return_selections="selections" in recorded,
            compute_logits=False, remat=remat)
        logp = token_logp(out.hidden, model.unembedding, batch["tokens"], config.temperature)
        loss, metrics = policy_loss(
            config.loss, logp=logp, behaviour_logp=batch["behaviour_logp"], advantages=batch["advantages"], mask=batch["loss_mask"],
            rollout_ids=batch["rollout_ids"], group_ids=batch["group_ids"], normaliser=batch["loss_tokens"], **hyper)
        return loss, metrics | flips(out, recorded)

    return objective


def flips(out, recorded: dict[str, Array]) -> dict[str, Array]:
    """Counts of (layer, token) places with recorded routing, and of those where the trainer chose another set than the engine."""
    metrics = {}
    for name, chosen in (("experts", out.routing), ("selections", out.selections)):
        if name in recorded:
            engine, trainer = recorded[name], jnp.stack(list(chosen.values()))
            known = engine[..., 0] >= 0
            differ = (jnp.sort(engine, axis=-1) != jnp.sort(trainer, axis=-1)).any(axis=-1)
            metrics |= {f"{name}_recorded": known.sum(dtype=jnp.float32), f"{name}_flipped": (known & differ).sum(dtype=jnp.float32)}
    return metrics


@dataclasses.dataclass(frozen=True)
class Batch:
    """One update's rollouts: tickets to give back, ids to close as trained, and of each item its trajectory, advantage and staleness.

    A group that was padded has an item twice; the rollouts that the repeats stand for keep their places in the admission bound until the
    update is published, like the others.
    """

    tickets: list[Ticket]
    trained_ids: list[int]
    trajectories: list[Trajectory]
    group_ids: np.ndarray
    advantages: np.ndarray
    staleness: np.ndarray


HOPELESS = 4  # times as many rollouts as may be on their way are dropped in a row: the run gives up


class NoProgress(RuntimeError):
    """Group after group was dropped and nothing trained: the run would go on for ever."""


class Selector:
    """Decides which finished groups are trained: the oldest first, each checked against the staleness bound when it is leased."""

    def __init__(
        self, ring: TrajectoryRing, prompts: PromptQueue, admission: Admission, config: RLConfig, dropped: Callable[[int], None]
    ):
        """`dropped` is told how many rollouts will not be trained, so that others may take their places."""
        self.ring, self.prompts, self.admission, self.config, self._dropped = ring, prompts, admission, config, dropped
        self._dropped_in_a_row = collections.Counter()  # reasons of rollouts in groups dropped since the last batch

    def next_batch(self, version: int) -> Batch | None:
        """A whole batch if enough groups are ready, else None. Groups that fail the rule are dropped, their prompts issued again.

        Raises NoProgress when everything that may be on its way was dropped several times over and no update came of it.
        """
        self.ring.poll()
        wanted = self.config.batch_rollouts // self.config.group_size
        chosen: list[tuple[list[Ticket], list[tuple[int, bool]]]] = []
        with self.prompts.ledger.transaction():  # nobody starts in between: the order of what is issued does not depend on timing
            for tickets in self._complete_groups():
                filled = fill_group(tickets, self.config.group_size, version, self.config.max_staleness)
                if not filled:
                    self._drop_group(tickets, version)
                else:
                    chosen.append((tickets, filled))
                    if len(chosen) == wanted:
                        break
        if len(chosen) < wanted:
            return None
        self._dropped_in_a_row.clear()
        return self._lease(chosen, version)

    def _complete_groups(self) -> list[list[Ticket]]:
        groups = collections.defaultdict(list)
        for ticket in self.ring.ready():
            groups[ticket.header.group_id].append(ticket)
        complete = [group for group in groups.values() if len(group) == self.config.group_size]
        return sorted(complete, key=lambda group: (min(ticket.header.start_version for ticket in group), group[0].header.group_id))

    def _reason(self, ticket: Ticket, version: int) -> str:
        if not is_valid(ticket, version, self.config.max_staleness):
            return "stale" if is_stale(ticket.oldest_version, version, self.config.max_staleness) else ticket.status.value
        return "group"  # sound itself, but too few of its group are

    def _close(self, tickets: list[Ticket], version: int) -> None:
        for ticket in tickets:
            self.prompts.ledger.dropped([ticket.header.rollout_id], self._reason(ticket, version))
        self.ring.release(tickets)

    def _drop_group(self, tickets: list[Ticket], version: int) -> None:
        ledger, prompt_id = self.prompts.ledger, tickets[0].header.prompt_id
        self._dropped_in_a_row.update(self._reason(ticket, version) for ticket in tickets)
        if self._dropped_in_a_row.total() > HOPELESS * self.admission.limit:
            reasons = ", ".join(f"{number} {reason}" for reason, number in self._dropped_in_a_row.most_common())
            raise NoProgress(
                f"{self._dropped_in_a_row.total()} rollouts in a row were dropped and none trained ({reasons}); "
                f"the last were of {tickets[0].header.environment}")
        with ledger.transaction():
            self._close(tickets, version)
            self.admission.dropped(len(tickets))
            self._dropped(len(tickets))
            if prompt_id in ledger.pending_prompts() and ledger.requeue(prompt_id):
                self.prompts.again(prompt_id)

    def _lease(self, chosen: list[tuple[list[Ticket], list[tuple[int, bool]]]], version: int) -> Batch:
        kept, items, group_ids, rewards, staleness = [], [], [], [], []
        for tickets, filled in chosen:
            valid = {index for index, _ in filled}
            invalid = [ticket for index, ticket in enumerate(tickets) if index not in valid]
            if invalid:
                with self.prompts.ledger.transaction():
                    self._close(invalid, version)
            kept += [tickets[index] for index in sorted(valid)]
            for index, _ in filled:
                items.append(tickets[index])
                group_ids.append(tickets[index].header.group_id)
                rewards.append(tickets[index].reward)
                staleness.append(version - tickets[index].oldest_version)
        copies = dict(zip((ticket.header.rollout_id for ticket in kept), self.ring.lease(kept), strict=True))
        advantages = group_advantages(np.array(rewards), np.array(group_ids), np.ones(len(items), bool), self.config.advantage)
        return Batch(
            kept, [ticket.header.rollout_id for ticket in kept], [copies[ticket.header.rollout_id] for ticket in items],
            np.array(group_ids), advantages, np.array(staleness))


def lay_out(
    batch: Batch, row_length: int, microbatch_rows: int, batch_rollouts: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.int32]:
    """The arguments (batch, shared, microbatches) of an update: arrays [M, microbatch_rows, row_length], and how many of M are used.

    M is such that every rollout could have a row to itself, so that one compiled shape holds any batch; M's unused rest is not computed.
    """
    rows = -(-batch_rollouts // microbatch_rows) * microbatch_rows
    packed = pack_segments([trajectory.segments[0] for trajectory in batch.trajectories], row_length, rows)
    item = np.maximum(packed.item, 0)
    ids = np.array([trajectory.rollout_id for trajectory in batch.trajectories])
    arrays = {
        "tokens": packed.tokens, "segment_ids": packed.segment_ids, "loss_mask": packed.loss_mask, "behaviour_logp": packed.behaviour_logp,
        "advantages": batch.advantages.astype(np.float32)[item], "rollout_ids": ids.astype(np.int32)[item],
        "group_ids": batch.group_ids.astype(np.int32)[item],
    }
    arrays |= {name: value for name in ("experts", "selections") if (value := getattr(packed, name)) is not None}
    used = int((packed.segment_ids != 0).any(axis=1).sum())
    arrays = {name: value.reshape(-1, microbatch_rows, *value.shape[1:]) for name, value in arrays.items()}
    return arrays, {"loss_tokens": np.float32(packed.loss_mask.sum())}, np.int32(-(-used // microbatch_rows))


def build_rl_update(config: RLConfig, optimizer: optax.GradientTransformation, remat: str = "none", dtype: Any = None) -> Callable:
    return build_update(rl_objective(config, remat, dtype), optimizer)


@functools.partial(jax.jit, static_argnames="dtype")
def _copy(model: Transformer, dtype: str) -> Transformer:
    """In memory of its own, and on a mesh whole on every device."""
    if dtype != "float32":
        model = model.astype(dtype)
    whole = (lambda w: w) if jax.sharding.get_abstract_mesh().empty else lambda w: reshard(w, PartitionSpec())
    return jax.tree.map(lambda w: whole(jnp.copy(w)), model)


def publishable_copy(model: Transformer, dtype: str = "float32") -> Transformer:
    """What an engine generates with, untouched by later updates. On a mesh: whole, on this process's first device, and known to no mesh, so
    that no engine ever waits for another process."""
    copy = _copy(model, dtype)
    return copy if jax.sharding.get_abstract_mesh().empty else jax.tree.map(lambda w: w.addressable_data(0), copy)
