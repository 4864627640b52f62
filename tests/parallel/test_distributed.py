"""What processes agree on, what they feed, and that two processes compute what one does."""

import threading
import time
import types

import jax
import numpy as np
import pytest
import two_processes

from glm_jax.parallel import distributed, make_mesh
from glm_jax.parallel.distributed import ALONE, PeerError, Peers, check_devices, feed, own_rows, start


class Store:
    """The part of the coordination service's client that Peers uses, in memory."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def key_value_dir_get(self, prefix):
        with self.changed:
            return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]

    def key_value_delete(self, prefix):
        with self.changed:
            for key in [key for key in self.values if key.startswith(prefix)]:
                del self.values[key]

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nothing there")
            return self.values[key]


@pytest.fixture
def group(monkeypatch):
    """group(n, seconds): n Peers of one store."""
    made = []
    monkeypatch.setattr(distributed, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(distributed, "GRACE_SECONDS", 1e6)  # nobody ends the tests' process

    def make(count, timeout_seconds=20.0):
        store = Store()
        made.extend(peers := [Peers(index, count, store, timeout_seconds) for index in range(count)])
        return peers

    yield make
    for peers in made:
        peers.close()


def together(peers, *functions):
    """Results, or exceptions, of function(peer) in a thread each."""
    results = [None] * len(peers)

    def call(number, function):
        try:
            results[number] = function(peers[number])
        except PeerError as error:
            results[number] = error

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_alone_everything_is_at_once():
    assert ALONE.gather("x", {"a": (1, 2)}) == [{"a": (1, 2)}]
    assert ALONE.sums("x", {"a": 1.5}) == {"a": 1.5} and ALONE.any("x", True) and ALONE.first
    with ALONE.deadline("x"):
        ALONE.stop(2)
        ALONE.fail("x")


def test_every_process_gets_the_same_list_and_the_store_stays_small(group):
    peers = group(3)

    def rounds(peer):
        said = [peer.gather(f"round {n}", [peer.index, n]) for n in range(20)]
        total = peer.sums("sums", {"a": peer.index, f"only {peer.index}": 1, "b_max": -peer.index})
        return said, total, peer.any("any", peer.index == 2), peer.any("none", False)

    first, *others = together(peers, *[rounds] * 3)
    assert first == others[0] == others[1]
    assert first[0] == [[[0, n], [1, n], [2, n]] for n in range(20)]
    assert first[1:] == ({"a": 3, "only 0": 1, "only 1": 1, "only 2": 1, "b_max": 0}, True, False)
    assert len(peers[0]._client.values) <= 2


def test_a_process_that_does_not_come_is_named(group):
    peers = group(3, timeout_seconds=0.3)
    here = [lambda peer: peer.gather("update 7")] * 2
    began = time.monotonic()
    results = together([peers[0], peers[2]], *here)
    assert isinstance(results[0], PeerError) and "update 7: waited 0 s for process 1; it is stuck" in str(results[0])
    assert isinstance(results[1], PeerError) and "no word from process 0" in str(results[1])
    assert time.monotonic() - began < 10


def test_processes_at_different_steps_are_an_error(group):
    results = together(group(2, 1.0), lambda peer: peer.gather("update 7"), lambda peer: peer.gather("update 8"))
    assert "not at the same step: process 0 at 'update 7', others at {1: 'update 8'}" in str(results[0])


def test_a_failure_ends_whoever_waits(group):
    peers = group(3)

    def fails(peer):
        time.sleep(0.2)
        peer.fail("ValueError: no")

    results = together(peers, lambda peer: peer.gather("x"), fails, lambda peer: peer.gather("x"))
    assert all(isinstance(result, PeerError) and "process 1 failed: ValueError: no" in str(result) for result in (results[0], results[2]))


def test_whoever_stops_first_waits_for_the_signals_number(group):
    peers = group(2)
    peers[0].stop(15)
    assert peers[1].stopped is None and together(peers, *[lambda peer: peer.stopped_by()] * 2) == [15, 15]


def test_a_process_number_that_is_none_is_named(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES=two is not a number"):
        start()


def test_a_stop_reaches_all(group):
    peers, heard = group(2), threading.Event()
    peers[0].on_news(heard.set)
    peers[1].stop(15)
    assert heard.wait(5) and peers[0].stopped == 15 and peers[0].failure is None


def test_what_takes_too_long_fails_the_run(group, capfd):
    peers = group(2, timeout_seconds=0.2)
    with peers[1].deadline("an update"):
        end = time.monotonic() + 5
        while peers[0].failure is None and time.monotonic() < end:
            time.sleep(0.01)
    assert "process 1 failed: an update has not ended for 0 s: some process is stuck" in str(peers[0].failure)
    assert "process 1: an update has not ended" in capfd.readouterr().err


def test_start_finds_no_others_and_says_what_is_missing(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    assert distributed.start().count == 1
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    assert distributed.start().count == 1


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "context": 4}, {"context": 8}, {"fsdp": 4, "expert": 2}])
def test_rows_arrive_in_order_on_any_mesh(sizes):
    mesh, rows = make_mesh(**sizes), np.arange(2 * 8 * 3).reshape(2, 8, 3)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(feed({"a": rows}, mesh)["a"], rows)
    parts = [own_rows(rows, types.SimpleNamespace(index=index, count=2), 1) for index in range(2)]
    assert parts[0].shape == (2, 4, 3)
    np.testing.assert_array_equal(np.concatenate(parts, 1), rows)
    assert feed({"a": rows}, None)["a"] is rows


def test_devices_outside_the_mesh_are_refused(group):
    peers = group(2)[0]
    with pytest.raises(ValueError, match=r"2 processes have 8 devices and the mesh 4: the product .* must be 8"):
        check_devices(make_mesh(data=4), peers)
    with pytest.raises(ValueError, match="7 rows do not divide over 2 processes"):
        own_rows(np.zeros((1, 7)), peers, 1)
    check_devices(None, ALONE)


@pytest.mark.timeout(240)
def test_two_processes_compute_what_one_does(tmp_path):
    """Loss within 1e-6 of itself, gradients within 1e-5 of their largest, weights after three steps within 1e-6 of their largest."""
    program = two_processes.__file__
    one = two_processes.start(program, tmp_path / "one.npz", count=1, devices=8)
    for status, output in two_processes.finish([*one, *two_processes.start(program, tmp_path / "two.npz")], 200):
        assert status == 0, output
    expected, result = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("one", "two"))
    assert result.keys() == expected.keys() and sum(name.startswith("gradient") for name in result) > 20
    for name, value in expected.items():
        if name.startswith("loss "):
            np.testing.assert_allclose(result[name], value, rtol=1e-6, err_msg=name)
        elif value.size:
            largest = np.abs(value).max()
            assert np.abs(result[name] - value).max() <= (1e-6 if name.startswith("weight") else 1e-5) * largest, name
