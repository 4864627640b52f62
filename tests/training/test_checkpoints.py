"""A checkpoint gives back what was saved, bit for bit, or says that it cannot."""

import os
import signal
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import struct

from glm_jax.training.checkpoints import CheckpointMismatch, Checkpoints
from glm_jax.training.optimizers import adamw
from glm_jax.training.step import TrainState, init_state


@struct.dataclass
class Model:
    """As the network: a pytree with a static field, of several dtypes."""

    weight: jax.Array
    layers: dict
    name: str = struct.field(pytree_node=False, default="tiny")


OPTIMIZER = adamw(1e-2, warmup_steps=2, weight_decay=0.1)
DOCUMENT = {"phase": "rl", "cursor": {"pending": [1, 2]}, "seed": 2**63, "nested": [None, 0.1, "é"]}
PAYLOADS = {"tokens": np.arange(7, dtype=np.int16), "none": np.zeros((0, 3), np.float32), "names": np.array(["a", "bc"])}


def make_state(seed=0):
    key = jax.random.key(seed)
    empty = jnp.zeros((0, 3), jnp.bfloat16)  # the dense layers of a model that has none
    layers = {"router_bias": jnp.full(4, -0.0), "kernel": jax.random.normal(key, (3, 4)).astype(jnp.bfloat16), "none": empty}
    return init_state(Model(jax.random.normal(key, (5, 3)), layers), OPTIMIZER)


@jax.jit
def advance(state):
    gradients = jax.tree.map(lambda x: jnp.sin(x + 1), state.model)
    changes, optimizer = OPTIMIZER.update(gradients, state.optimizer, state.model)
    return TrainState(state.step + 1, optax.apply_updates(state.model, changes), optimizer)


donating = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 + 7, state), donate_argnums=0)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y) and x.dtype == y.dtype and x.shape == y.shape and np.asarray(x).tobytes() == np.asarray(y).tobytes()


def damage(directory, step, part="arrays"):
    """Halves the files of one item."""
    files = [path for path in (directory / str(step) / part).rglob("*") if path.is_file() and path.stat().st_size > 1]
    assert files
    for path in files:
        os.truncate(path, path.stat().st_size // 2)


def test_round_trip_is_exact_and_owned(tmp_path):
    state = advance(advance(make_state()))
    expected = jax.tree.map(lambda x: np.array(x), state)
    with Checkpoints(tmp_path / "deep" / "er", keep=2) as checkpoints:
        assert checkpoints.save(3, state, DOCUMENT, PAYLOADS)
        donating(state)  # perhaps while the thread still writes
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        assert checkpoints.latest() == 3
    template = jax.eval_shape(make_state)
    with Checkpoints(tmp_path / "deep" / "er", keep=2) as checkpoints:
        arrays, document, payloads = checkpoints.restore(checkpoints.latest(), template)
        again, _, _ = checkpoints.restore(3, advance(make_state(1)))
    assert document == DOCUMENT
    assert payloads.keys() == PAYLOADS.keys()
    for name, array in PAYLOADS.items():
        np.testing.assert_array_equal(payloads[name], array, strict=True)
    assert_same(jax.tree.map(np.asarray, arrays), expected)
    assert_same(arrays, again)
    donating(arrays)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(arrays))  # nobody else views the memory
    assert_same(jax.tree.map(np.asarray, again), expected)
    assert_same(advance(again), advance(advance(advance(make_state()))))


def test_shardings_and_numpy_leaves(tmp_path):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    rows, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))
    values = np.arange(16, dtype=np.float32)
    host = np.arange(3)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(0, {"x": jax.device_put(values, rows), "host": host}, {})
        host[:] = -1
        for sharding in (rows, whole, None):
            template = {"x": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding), "host": np.zeros(3, int)}
            arrays, _, payloads = checkpoints.restore(0, template)
            np.testing.assert_array_equal(arrays["x"], values)
            assert (arrays["x"].committed, arrays["x"].sharding) == (True, sharding) if sharding else not arrays["x"].committed
            x = jax.jit(lambda x: x + 1, donate_argnums=0)(arrays["x"])
            assert arrays["x"].is_deleted() and np.asarray(x)[3] == 4
            assert isinstance(arrays["host"], np.ndarray) and arrays["host"].tolist() == [0, 1, 2] and payloads == {}


def test_keeps_the_newest(tmp_path):
    state = make_state()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() is None
        for step in (1, 5, 12):
            assert checkpoints.save(step, state, {"step": step})
        assert not checkpoints.save(12, state, {"step": "another"})
        with pytest.raises(ValueError, match="step 7 after one of step 12"):
            checkpoints.save(7, state, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["12", "5"]
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() == 12
        assert checkpoints.restore(12, state)[1] == {"step": 12}
        assert checkpoints.restore(5, state)[1] == {"step": 5}
        with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 1 .* there are \[5, 12\]"):
            checkpoints.restore(1, state)


@pytest.mark.parametrize("part", ["arrays", "json", "payloads", "json/metadata"])
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(tmp_path, part):
    first, second = make_state(), advance(make_state())
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(1, first, {"step": 1})
        checkpoints.save(2, second, {"step": 2}, PAYLOADS)
    if part == "json/metadata":
        (tmp_path / "2" / part).unlink()
    else:
        damage(tmp_path, 2, part)
    (tmp_path / "3").mkdir()  # and one that has nothing at all
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        with pytest.warns(RuntimeWarning, match="CHECKPOINT UNREADABLE: step") as warned:
            arrays, document, payloads = checkpoints.restore(checkpoints.latest(), jax.eval_shape(make_state))
        assert [str(w.message).split(" in ")[0][-6:] for w in warned if w.category is RuntimeWarning] == ["step 3", "step 2"]
        assert_same(arrays, first)
        assert (document, payloads) == ({"step": 1}, {})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "unreadable-2", "unreadable-3"]
        assert checkpoints.latest() == 1
        assert checkpoints.save(2, second, {"step": 2})
        assert_same(checkpoints.restore(2, first)[0], second)


def test_what_another_process_cannot_read_is_unreadable(tmp_path):
    """The one before it is restored, by all."""
    said = []

    class Two:
        count = 1  # processes that hold arrays

        def gather(self, what, value):
            said.append((what, value))
            return [value, "OSError: no such device"] if what == "checkpoint 2 read" else [value, None]

    with Checkpoints(tmp_path, 3) as saved:
        for step in (1, 2):
            saved.save(step, {"x": jnp.full(3, step)}, {"step": step})
    with Checkpoints(tmp_path, 3, Two()) as saved, pytest.warns(RuntimeWarning, match="process 1: OSError: no such device"):
        arrays, document, _ = saved.restore(2, {"x": jnp.zeros(3, jnp.int32)})
    assert document == {"step": 1} and arrays["x"].tolist() == [1, 1, 1]
    assert said == [("checkpoint 2 read", None), ("checkpoint 1 read", None)]


def test_errors_of_the_caller_set_nothing_aside(tmp_path):
    state = make_state()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        with pytest.raises(FileNotFoundError, match="there are none"):
            checkpoints.restore(0, state)
        with pytest.raises(TypeError):
            checkpoints.save(1, state, {"array": np.zeros(2)})
        checkpoints.save(1, state, {})
        with pytest.raises(CheckpointMismatch, match=r"model\.weight is float32\[5, 3\] there and float32\[5, 4\] in the template"):
            checkpoints.restore(1, state.replace(model=state.model.replace(weight=jnp.zeros((5, 4)))))
        with pytest.raises(CheckpointMismatch, match="optimizer.* is .* there and nothing in the template"):
            checkpoints.restore(1, state.replace(optimizer=()))
        assert checkpoints.latest() == 1
    damage(tmp_path, 1)
    with Checkpoints(tmp_path, keep=2) as checkpoints, pytest.warns(RuntimeWarning):
        with pytest.raises(FileNotFoundError, match=r"none of the checkpoints \[1\]"):
            checkpoints.restore(1, state)
    assert (tmp_path / "1").is_dir()
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


@pytest.mark.parametrize("call", ["save", "latest", "wait", "close"])
def test_an_error_of_the_thread_comes_out_of_the_next_call(tmp_path, monkeypatch, call):
    state = make_state()
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    with monkeypatch.context() as patch:

        async def full(*_):
            raise OSError("disk full")

        patch.setattr(ocp.JsonCheckpointHandler, "_save_fn", full)
        checkpoints.save(2, state, {})
        with pytest.raises(OSError, match="disk full"):
            {"save": lambda: checkpoints.save(3, state, {})}.get(call, getattr(checkpoints, call))()
    if call != "close":
        assert checkpoints.latest() == 1
        assert checkpoints.save(2, state, {"good": True})
        checkpoints.close()
    with Checkpoints(tmp_path, keep=2) as again:
        assert again.latest() == (1 if call == "close" else 2)


def test_a_shutdown_saves_while_threads_run(tmp_path):
    stop, asked = threading.Event(), threading.Event()
    checkpoints = Checkpoints(tmp_path, keep=2)
    state = make_state()

    def compute():
        x = jnp.ones((32, 32))
        while not stop.is_set():
            x = jnp.tanh(x @ x).block_until_ready()

    def save():
        for step in range(1, 5):
            checkpoints.save(step, state, {"step": step})

    threads = [threading.Thread(target=target) for target in (compute, save)]
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        for thread in threads:
            thread.start()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(10)
        checkpoints.wait()  # beside the saves of the other thread
        threads[1].join()
        assert checkpoints.save(9, state, {"step": 9})
        checkpoints.close()
    finally:
        stop.set()
        signal.signal(signal.SIGTERM, before)
        for thread in threads:
            thread.join()
    with warnings.catch_warnings(), Checkpoints(tmp_path, keep=2) as again:
        warnings.simplefilter("error", RuntimeWarning)
        assert_same(again.restore(again.latest(), state)[0], state)
