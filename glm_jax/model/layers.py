"""Norms, rotary embedding, SwiGLU: the pieces that every layer shares."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from glm_jax.model.parameters import weight
from glm_jax.parallel.axes import einsum


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """x / rms(x) * gain over the last axis, in float32, returned in x's type."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * gain


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> Array:
    """Layer normalisation over the last axis in float32."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (centred * scale).astype(x.dtype) * gain + bias


def rotary_angles(positions: Array, dim: int, theta: float) -> tuple[Array, Array]:
    """cos and sin of position * theta^(-2i/dim), float32 [..., dim/2] for positions [...]."""
    frequencies = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
    """Turns the pairs (x[2i], x[2i+1]) if interleaved, else (x[i], x[i + dim/2]); cos and sin [..., dim/2].

    Returns [first of each pair | second of each pair]. For interleaved pairs the order differs from the in-place form, the same way for
    queries and keys, so that their products do not (Hugging Face does likewise).
    """
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """down(silu(gate x) * up x) for x [B, T, D]."""
    return einsum("btf,fd->btd", jax.nn.silu(x @ gate) * (x @ up), down, "batch", "queries", None)


@struct.dataclass
class DenseFFN:
    """SwiGLU."""

    gate: Array = weight("embed", "ff", fan_in=("embed",))
    up: Array = weight("embed", "ff", fan_in=("embed",))
    down: Array = weight("ff", "embed", fan_in=("ff",))

    def __call__(self, x: Array) -> Array:
        return swiglu(x, self.gate, self.up, self.down)
