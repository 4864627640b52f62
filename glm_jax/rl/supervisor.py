"""Threads whose death ends the run: the first exception anywhere stops everything and is raised where the run is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Supervisor:
    """Starts named daemon threads, keeps the first exception, and tells everybody to stop.

    `on_stop` callbacks run once, on the thread that stops first, and must wake whatever waits.
    """

    def __init__(self):
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._on_stop: list[Callable[[], None]] = []
        self._running = 0

    def on_stop(self, wake: Callable[[], None]) -> None:
        self._on_stop.append(wake)

    def start(self, name: str, body: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guard, args=(body,), name=name, daemon=True)
        self._threads.append(thread)
        with self._changed:
            self._running += 1
        thread.start()

    def stop(self, error: BaseException | None = None) -> None:
        """Asks every thread to end; the first error given is the one that `wait` raises."""
        with self._changed:
            if error is not None and self.error is None:
                self.error = error
            first = not self.stopping.is_set()
            self.stopping.set()
            self._changed.notify_all()
        if first:
            for wake in self._on_stop:
                wake()

    def wait(self, until: Callable[[], bool], poll_seconds: float = 0.2) -> None:
        """Returns when `until()` holds, the run is stopping or no thread is left; raises the first error. Keeps signals deliverable."""
        with self._changed:
            while not (until() or self.stopping.is_set() or self._running == 0):
                self._changed.wait(poll_seconds)
        self.raise_error()

    def join(self, seconds: float) -> list[str]:
        """Waits for the threads at most this long in all; the names of those still alive."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0, seconds)
        return [thread.name for thread in self._threads if thread.is_alive()]

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # whatever ended a thread must end the run
            self.stop(error)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()
