"""Runs untrusted Python programs outside this process, in warm workers that know neither JAX nor this package.

A worker forks a confined child per program (see `python_worker.py`), so a program costs milliseconds. Linux only.
Run as root, programs run as nobody; run as another user, they run as that user and could kill their own worker.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from typing import Self

from glm_jax.environments.base import EnvironmentFailure

MAX_PROGRAM = 10_000  # characters; a request then fits in a pipe and writing it never blocks
PATIENCE = 30.0  # seconds beyond the deadline after which a silent worker is broken
_WORKER = pathlib.Path(__file__).with_name("python_worker.py")


@dataclasses.dataclass(frozen=True)
class Result:
    """What a program did. "ok": `outputs` holds one JSON value per input. "error", "timeout": its own doing, `message` says what."""

    kind: str
    outputs: list
    message: str = ""


class _Worker:
    """One worker process and the pipes to it. Used by one thread at a time."""

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.directory = ""

    def start(self) -> None:
        environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        # Ours to remove, since a killed worker does not; the programs' directories lie in it, and nobody must be able to pass through.
        self.directory = environment["TMPDIR"] = tempfile.mkdtemp(prefix="glm_jax-sandbox-")
        os.chmod(self.directory, 0o711)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,
        )

    def call(self, request: dict, seconds: float) -> dict:
        """Sends a request and waits for its response. Raises OSError when the worker is gone, silent or cannot be started."""
        if self.process is None:
            self.start()
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        responses = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(responses, select.POLLIN)
        data, until = b"", time.monotonic() + seconds
        while not data.endswith(b"\n"):
            if not poll.poll(1000 * max(0.0, until - time.monotonic())):
                raise TimeoutError(f"the worker did not answer within {seconds} s")
            chunk = os.read(responses, 65536)
            if not chunk:
                raise BrokenPipeError(f"the worker ended with status {self.process.wait()}")
            data += chunk
        return json.loads(data)

    def kill(self) -> None:
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what was still to be written has no reader any more
                pipe.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        self.process = None


class PythonSandbox:
    """A pool of warm workers; thread-safe.

    memory: address space of a program, bytes. processes: how many it may have besides itself (threads count); when run as root this
    counts every process of nobody on the machine.
    """

    def __init__(self, workers: int = 1, memory: int = 256 << 20, processes: int = 0):
        if workers < 1:
            raise ValueError(f"PythonSandbox needs at least one worker, got {workers}")
        self._limits = {"memory": memory, "processes": processes}
        self._workers = [_Worker() for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._closed = False
        self._executor = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        for worker in self._workers:
            worker.start()
            self._idle.put(worker)

    def run(self, program: str, function: str, inputs: list, deadline: float = 1.0) -> Result:
        """Executes `program`, then calls its `function` on each of `inputs` (JSON values, one argument each).

        deadline: seconds for all of it, by the wall clock, from the moment the program starts; waiting for a free worker is not counted.
        Raises EnvironmentFailure when the worker broke; it is then replaced for the next caller.
        """
        if len(program) > MAX_PROGRAM:
            return Result("error", [], f"the program has {len(program)} characters, more than {MAX_PROGRAM}")
        request = {"program": program, "function": function, "inputs": inputs, "deadline": deadline, **self._limits}
        worker = self._idle.get()
        try:
            if self._closed:
                raise EnvironmentFailure("the sandbox is closed")
            return self._call(worker, request)
        finally:
            self._idle.put(worker)

    def _call(self, worker: _Worker, request: dict) -> Result:
        try:
            response = worker.call(request, request["deadline"] + PATIENCE)
            if response["kind"] == "failure":
                raise OSError(response["message"])
            return Result(**response)
        except BaseException as error:
            # Whatever happened, also an interrupt of this thread, the worker may still owe an answer: it is not used again.
            worker.kill()
            with contextlib.suppress(OSError):  # the next caller tries again, and hears of it
                worker.start()
            if isinstance(error, OSError):
                raise EnvironmentFailure(f"the Python sandbox broke: {error}") from error
            raise

    async def run_async(self, program: str, function: str, inputs: list, deadline: float = 1.0) -> Result:
        """As `run`, without blocking the event loop; any loop in any thread may call it."""
        if self._closed:
            raise EnvironmentFailure("the sandbox is closed")
        return await asyncio.wrap_future(self._executor.submit(self.run, program, function, inputs, deadline))

    def close(self) -> None:
        """Ends the workers, after the programs that are running. Later calls raise EnvironmentFailure."""
        self._closed = True
        workers = [self._idle.get() for _ in self._workers]
        for worker in workers:
            worker.kill()
            self._idle.put(worker)  # for callers who were waiting, to find it closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


_default: PythonSandbox | None = None
_default_lock = threading.Lock()


def start_default_sandbox(workers: int = 1) -> PythonSandbox:
    """Starts the sandbox that environments share, if it is not running; a run calls this before it loads an accelerator runtime."""
    global _default
    with _default_lock:
        if _default is None:
            _default = PythonSandbox(workers)
            atexit.register(_default.close)
        return _default


def default_sandbox() -> PythonSandbox:
    """The sandbox that environments share, started at the first use."""
    return start_default_sandbox()


def _forget_after_fork() -> None:
    """A forked process must not talk into its parent's pipes: it starts its own workers when it needs them."""
    global _default, _default_lock
    if _default is not None:
        atexit.unregister(_default.close)
    _default, _default_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
