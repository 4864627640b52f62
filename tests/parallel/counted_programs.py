"""Small programs whose work is known by hand, compiled for four v5p chips that are not there; prints what the accounting reads, as JSON.

Its own process: libtpu stays out of the tests'.
"""

import json

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, reshard

from glm_jax.parallel.planning import account, describe, plan_mesh

MESH = plan_mesh(describe("v5p:2x2x1"), {"fsdp": 4})


def array(shape, *split, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, PartitionSpec(*split)))


def scanned(x, layers):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]


def gathered(x, layers):
    """Loss and gradient of layers that are stored split over fsdp and computed again in the backward pass."""
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ reshard(w, PartitionSpec(None, None))), None))
    loss = lambda layers: lax.scan(layer, x, layers)[0].astype(jnp.float32).sum()
    return jax.value_and_grad(loss)(layers)


def until_data_says(x, w, n):
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]


def expected(x, w, n):
    with jax.named_scope("expected_trips_9"):
        return until_data_says(x, w, n)


def either(x, layers, twice):
    """Of 8 layers 2 multiply twice."""
    def step(x, layer):
        w, twice = layer
        with jax.named_scope("expected_share_2_of_8"):
            return lax.cond(twice, lambda x: jnp.tanh(x @ w @ w), lambda x: jnp.tanh(x @ w), x), None
    return lax.scan(step, x, (layers, twice))[0]


def scattered(x, places, rows):
    """In each of 7 trips 8 rows of 65536, where they are."""
    return lax.scan(lambda x, place: (x.at[place].add(rows), None), x, places)[0]


def doubled(x):
    return x * 2


PROGRAMS = {
    scanned: (array((64, 256)), array((7, 256, 256))),
    gathered: (array((4096, 4096), "fsdp"), array((5, 4096, 4096), None, "fsdp")),
    until_data_says: (array((64, 256)), array((256, 256)), array((), dtype=jnp.int32)),
    expected: (array((64, 256)), array((256, 256)), array((), dtype=jnp.int32)),
    either: (array((64, 256)), array((8, 256, 256)), array((8,), dtype=jnp.bool_)),
    scattered: (array((65536, 512), dtype=jnp.float32), array((7, 8), dtype=jnp.int32), array((8, 512), dtype=jnp.float32)),
    doubled: (array((4096, 65536), dtype=jnp.float32),),
}

if __name__ == "__main__":
    found = {}
    for function, arguments in PROGRAMS.items():
        with jax.set_mesh(MESH):
            work = account(jax.jit(function).lower(*arguments).compile().as_text(), MESH.size)
        found[function.__name__] = {
            "flops": work.flops, "hbm_bytes": work.hbm_bytes, "sent": work.sent(), "unknown": sorted(work.unknown)}
    print(json.dumps(found))
