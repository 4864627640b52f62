"""How old a trajectory may be, and how many rollouts may be on the way so that it does not get older.

Two bounds, because neither does the other's work. `Admission` limits how many rollouts are unpublished, so that with the oldest trained
first a rollout that waits its turn is not over-stale when it comes; a rollout that is slower than its neighbours can still be, so the
learner asks `is_stale` of each trajectory when it leases it.
"""

from __future__ import annotations

from cereggii import AtomicInt64


def is_stale(oldest_version: int, current_version: int, max_staleness: int) -> bool:
    """w_now − w_0 > τ (GLM-5, arXiv 2602.15763, §4.1.2). `oldest_version` -1 (nothing was sampled) is not stale; it is no use either."""
    return oldest_version >= 0 and current_version - oldest_version > max_staleness


class Admission:
    """At most (max_staleness + 1) · publish_every · batch_rollouts rollouts are unpublished: running, ready, leased, or trained by an
    update whose weights are not published yet.

    The last kind belongs to it: a rollout that starts j updates after a publication finds j batches gone and not yet counted as a
    version, and without them in the sum it could be trained at staleness max_staleness + 1.

    `try_admit` may be called by any thread; the other methods are the learner's.
    """

    def __init__(self, max_staleness: int, publish_every: int, batch_rollouts: int, live: int = 0, trained: int = 0):
        """`live` and `trained` are a checkpoint's: rollouts that survive, and rollouts trained since the last publication."""
        if max_staleness < 0 or publish_every < 1 or batch_rollouts < 1:
            raise ValueError(
                f"max_staleness {max_staleness} ≥ 0, publish_every {publish_every} ≥ 1, batch_rollouts {batch_rollouts} ≥ 1 must hold"
            )
        self.limit = (max_staleness + 1) * publish_every * batch_rollouts
        self._unpublished = AtomicInt64(live + trained)
        self._trained = trained

    @property
    def unpublished(self) -> int:
        return self._unpublished.get()

    @property
    def trained_unpublished(self) -> int:
        """Rollouts trained since the last publication: part of the checkpoint."""
        return self._trained

    def try_admit(self, rollouts: int) -> bool:
        """Counts `rollouts` more in, all or none; False when they would pass the limit."""
        if rollouts > self.limit:
            raise ValueError(
                f"{rollouts} rollouts at once can never be admitted: the limit is {self.limit}; raise batch_rollouts or max_staleness"
            )
        while True:
            now = self._unpublished.get()
            if now + rollouts > self.limit:
                return False
            if self._unpublished.compare_and_set(now, now + rollouts):
                return True

    def dropped(self, rollouts: int) -> None:
        """These will not be trained: their places are free at once."""
        self._unpublished.increment_and_get(-rollouts)

    def trained(self, rollouts: int) -> None:
        """An update used these: their places are free with the next publication."""
        self._trained += rollouts

    def published(self) -> None:
        """The current weights have become a version."""
        self._unpublished.increment_and_get(-self._trained)
        self._trained = 0
