"""How an api picks one of an operation's implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def choose(operation: str, implementation: str, available: Mapping[str, Callable]) -> Callable:
    """The implementation asked for; "auto" is "xla". Raises ValueError that names what exists."""
    name = "xla" if implementation == "auto" else implementation
    if name not in available:
        raise ValueError(f"{operation}: no implementation {implementation!r}; available: auto, {', '.join(available)}")
    return available[name]
