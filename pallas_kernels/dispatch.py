"""What every operation needs: the choice of an implementation, and arguments that a hand-written gradient may read inside shard_map."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax


def choose(operation: str, implementation: str, available: Mapping[str, Callable]) -> Callable:
    """The implementation asked for; "auto" is "xla". Raises ValueError that names what exists."""
    name = "xla" if implementation == "auto" else implementation
    if name not in available:
        raise ValueError(f"{operation}: no implementation {implementation!r}; available: auto, {', '.join(available)}")
    return available[name]


def varying_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Inside shard_map: the arrays, each as one that differs between devices wherever any of them does.

    A custom_vjp needs it: its gradients differ so, and this cast's transpose sums them over the devices that share an argument.
    """
    axes = frozenset().union(*(jax.typeof(x).mat.varying for x in arrays))
    missing = [tuple(axes - jax.typeof(x).mat.varying) for x in arrays]
    return tuple(jax.lax.pcast(x, names, to="varying") if names else x for x, names in zip(arrays, missing, strict=True))
