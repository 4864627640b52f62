"""Several processes that train one model: start-up, what they agree on, and the rows that each of them feeds.

Every process runs the same program and must launch the same device programs that span processes in the same order, so one thread of each
process launches them, and what that thread does next is agreed on first: `Peers.gather`. Agreement goes through the key-value store of
JAX's coordination service, host to host. It takes no device, costs a few milliseconds, may wait for a slow process without blocking an
accelerator, and has what a collective has not: a time-out that names who is missing (jax#38503: a live but stuck process hangs all others).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import distributed as _jax_distributed  # the key-value store's client has no public name
from jax._src.clusters import ClusterEnv  # nor has the question whether there is a cluster at all
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from glm_jax.parallel.axes import spec

GRACE_SECONDS = 15.0  # between the first news of a failure and the end of every process, by force where it must be
POLL_SECONDS = 0.5
HEARTBEAT_SECONDS = 60  # a process that is silent for so long is dead, and JAX ends the others
_PREFIX = "glm_jax"


class PeerError(RuntimeError):
    """Another process failed, is stuck, or does something else than this one."""


class Peers:
    """The processes of a run, and what they tell each other. Alone, everything here is at once and costs nothing.

    index, count   of this process, of all
    stopped        the number of the signal that some process was asked to stop with, or None
    failure        the PeerError that ends this process because another one failed, or None
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None, timeout_seconds: float = 1800.0):
        """`client` is that of JAX's coordination service."""
        self.index, self.count, self.timeout_seconds = index, count, timeout_seconds
        self.stopped: int | None = None
        self.failure: PeerError | None = None
        self._client, self._rounds = client, 0
        self._on_news: list[Callable[[], None]] = []
        self._deadline: tuple[float, str] | None = None
        self._ends_at: float | None = None
        self._asked: int | None = None  # to be told to the others
        self._closed = threading.Event()
        if count > 1:
            threading.Thread(target=self._listen, name="peers", daemon=True).start()

    @property
    def first(self) -> bool:
        """The process that writes metrics, reports and the terminal."""
        return self.index == 0

    def on_news(self, callback: Callable[[], None]) -> None:
        """Called on a thread of its own when `stopped` or `failure` is set; must not block."""
        self._on_news.append(callback)

    def gather(self, what: str, value: Any = None) -> list[Any]:
        """The JSON-able values of all processes, in their order; every process gets the same list, and none before all have come.

        To be called by one thread of each process. `what` names the step for people, and must be the same everywhere.
        Raises PeerError when a process failed, is at another step, or did not come within `timeout_seconds`.
        """
        if self.count == 1:
            return [value]
        number, self._rounds = self._rounds, self._rounds + 1
        self._client.key_value_set(f"{_PREFIX}/asked/{number}/{self.index}", json.dumps([what, value]))
        answer = f"{_PREFIX}/answer/{number}"
        if self.first:
            values = self._collect(number, what)
            self._client.key_value_set(answer, json.dumps(values))
            self._client.key_value_delete(f"{_PREFIX}/asked/{number}/")
            self._client.key_value_delete(f"{_PREFIX}/answer/{number - 1}")  # everybody has read it: everybody has come here
            return values
        end = time.monotonic() + self.timeout_seconds + 2 * POLL_SECONDS  # process 0 knows better who is missing: let it speak first
        while True:
            self._raise_failure()
            try:
                return json.loads(self._client.blocking_key_value_get(answer, int(1000 * POLL_SECONDS)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise PeerError(f"{what}: process 0 cannot be reached: {error}") from error
            if time.monotonic() > end:
                raise PeerError(f"{what}: no word from process 0 for {self.timeout_seconds:.0f} s")

    def any(self, what: str, value: bool) -> bool:
        """Whether it holds in some process."""
        return any(self.gather(what, bool(value)))

    def sums(self, what: str, values: Mapping[str, float]) -> dict[str, float]:
        """The processes' sums and counts, added up by name; of names that end in `_max` the largest."""
        total: dict[str, float] = {}
        for part in self.gather(what, dict(values)):
            for name, value in part.items():
                total[name] = value if name not in total else max(total[name], value) if name.endswith("_max") else total[name] + value
        return total

    @contextlib.contextmanager
    def deadline(self, what: str) -> Iterator[None]:
        """What is done here waits for other processes' devices; when it takes longer than `timeout_seconds` the run fails."""
        self._deadline = (time.monotonic() + self.timeout_seconds, what)
        try:
            yield
        finally:
            self._deadline = None

    def stop(self, signal_number: int) -> None:
        """Tells the others that this process was asked to stop; a signal handler may call it."""
        self._asked = signal_number

    def fail(self, reason: str) -> None:
        """Tells the others that this process ends, and why; the others end too. It has GRACE_SECONDS left itself."""
        if self.count == 1 or self._closed.is_set():
            return
        self._ends_at = self._ends_at or time.monotonic() + GRACE_SECONDS
        if self.failure is None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 is gone, so they know
                self._client.key_value_set(f"{_PREFIX}/news/failed/{self.index}", reason, allow_overwrite=True)

    def stopped_by(self) -> int:
        """The number of the signal that some process was asked to stop with; its news may come later than what it led to."""
        end = time.monotonic() + GRACE_SECONDS
        while self.stopped is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 10)
        return signal.SIGTERM if self.stopped is None else self.stopped

    def close(self) -> None:
        """The run ended well: whatever happens to other processes from now on is not this one's concern."""
        self._closed.set()

    def _collect(self, number: int, what: str) -> list[Any]:
        began, pause = time.monotonic(), 0.0005
        while True:
            self._raise_failure()
            found = self._client.key_value_dir_get(f"{_PREFIX}/asked/{number}/")
            if len(found) == self.count:
                break
            if time.monotonic() - began > self.timeout_seconds:
                missing = sorted(set(range(self.count)) - {_process(key) for key, _ in found})
                raise PeerError(
                    f"{what}: waited {self.timeout_seconds:.0f} s for process {', '.join(map(str, missing))}; it is stuck or far behind. "
                    "Look at its output; a longer wait is mesh.timeout_seconds")
            time.sleep(pause)
            pause = min(0.02, 1.3 * pause)
        answers = {_process(key): json.loads(value) for key, value in found}
        steps = {process: step for process, (step, _) in answers.items()}
        if others := {process: step for process, step in steps.items() if step != what}:
            raise PeerError(f"the processes are not at the same step: process 0 at {what!r}, others at {others}; do their configs differ?")
        return [answers[process][1] for process in range(self.count)]

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _listen(self) -> None:
        """Body of the thread that hears of stops and failures, and ends a process that cannot end by itself."""
        while not self._closed.wait(POLL_SECONDS):
            now, deadline = time.monotonic(), self._deadline
            if self._ends_at is not None and now > self._ends_at:
                self._say(f"ended by force, for something in it still waits. {self.failure or ''}")
                os._exit(1)
            if deadline is not None and now > deadline[0] and self._ends_at is None:
                reason = f"{deadline[1]} has not ended for {self.timeout_seconds:.0f} s: some process is stuck"
                self._say(reason)
                self.fail(reason)
            if self.failure is None:
                try:
                    self._hear()
                except Exception as error:  # this thread must live: nobody else ends a stuck process
                    self._say(f"what other processes say cannot be heard: {type(error).__name__}: {error}")
                    self.fail(f"{type(error).__name__}: {error}")

    def _say(self, text: str) -> None:
        print(f"process {self.index}: {text}", file=sys.stderr, flush=True)

    def _hear(self) -> None:
        try:
            if self._asked is not None and self.stopped is None:
                self._client.key_value_set(f"{_PREFIX}/news/stop/{self.index}", str(self._asked), allow_overwrite=True)
            news = [(key.split("/"), value) for key, value in self._client.key_value_dir_get(f"{_PREFIX}/news/")]
        except jax.errors.JaxRuntimeError as error:
            news = [([*"..", "failed", "0"], f"cannot be reached: {str(error).partition(chr(10))[0]}")]
        heard = False
        for (*_, kind, process), value in news:
            if kind == "stop" and self.stopped is None:
                self.stopped, heard = int(value), True
            if kind == "failed" and int(process) != self.index and self.failure is None:
                self.failure, heard = PeerError(f"process {process} failed: {value}"), True
                self._ends_at = time.monotonic() + GRACE_SECONDS
        if heard:
            for callback in self._on_news:
                callback()


ALONE = Peers()


def start(timeout_seconds: float = 1800.0) -> Peers:
    """Joins the other processes, if there are any; before anything else of JAX is used.

    JAX finds them itself on TPU pods, Kubernetes, SLURM and Open MPI; anywhere, JAX_COORDINATOR_ADDRESS (host:port of process 0),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID say it. Where nothing does, this process is alone. ValueError: a setting is wrong.
    """
    def number(name: str) -> int | None:
        text = os.environ.get(name)
        if text is not None and not text.isdecimal():
            raise ValueError(f"{name}={text} is not a number")
        return None if text is None else int(text)

    count, index = number("JAX_NUM_PROCESSES"), number("JAX_PROCESS_ID")
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    found = ClusterEnv.auto_detect_unset_distributed_params(address, count, index, None, None, 300)
    if found[0] is None and count in (None, 1) or found[1] == 1:
        return Peers()
    try:
        jax.distributed.initialize(num_processes=count, process_id=index, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except ValueError as error:
        settings = "JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        raise ValueError(f"{error} Set {settings} in every process, or none of them") from error
    return Peers(jax.process_index(), jax.process_count(), _jax_distributed.global_state.client, timeout_seconds)


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """To be entered by every thread that computes with arrays of the mesh; without one, nothing."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def check_devices(mesh: Mesh | None, peers: Peers) -> None:
    """Raises ValueError unless the devices of every process are in the mesh: each has its part in every program."""
    size = 0 if mesh is None else mesh.size
    if peers.count > 1 and size != jax.device_count():
        raise ValueError(
            f"{peers.count} processes have {jax.device_count()} devices and the mesh {size}: "
            f"the product of mesh.data, fsdp, expert, context and model must be {jax.device_count()}")


def hosts_sharding(axis: int = 0) -> NamedSharding:
    """Splits `axis` of an array over the processes; each process's devices hold its whole part."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices).reshape(jax.process_count(), -1), ("host", "local"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, "host"))


def feed(rows: Mapping[str, np.ndarray], mesh: Mesh | None, axis: int = 1) -> dict[str, Any]:
    """This process's rows (`axis` of every array) and those of the others as one batch on the mesh, process after process.

    A process need not hold the rows that its devices are to have: where a row's devices are in several processes, it is sent there.
    Without a mesh: the arrays themselves.
    """
    if mesh is None:
        return dict(rows)
    batch = {}
    for name, local in rows.items():
        shape = (*local.shape[:axis], local.shape[axis] * jax.process_count(), *local.shape[axis + 1 :])
        entry = spec((*[None] * axis, "batch", *[None] * (local.ndim - axis - 1)), shape, mesh)
        array = local
        if jax.process_count() > 1:
            array = jax.make_array_from_process_local_data(hosts_sharding(axis), np.ascontiguousarray(local), shape)
        batch[name] = jax.device_put(array, NamedSharding(mesh, entry))
    return batch


def own_rows(array: np.ndarray, peers: Peers, axis: int) -> np.ndarray:
    """This process's rows of a batch that every process has whole."""
    rows = array.shape[axis]
    if rows % peers.count:
        raise ValueError(f"{rows} rows do not divide over {peers.count} processes")
    share = rows // peers.count
    return array.take(range(peers.index * share, (peers.index + 1) * share), axis)


def _process(key: str) -> int:
    return int(key.rsplit("/", 1)[1])
