"""Asynchronous reinforcement learning: ring, ledger, staleness, groups, advantages, policy losses, actors, learner, loop.

Names are loaded on first use: `ring` and `ledger` run in processes that have no JAX, and importing this package must not bring it in.
"""

import importlib

_HOME = {
    "Ledger": "ledger",
    "TrajectoryRing": "ring",
    "group_advantages": "advantages",
    "policy_loss": "losses",
}

__all__ = ["Ledger", "TrajectoryRing", "group_advantages", "policy_loss"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__():
    return sorted({*globals(), *_HOME})
