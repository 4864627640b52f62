"""A run from its first signal handler to its exit status: the mesh, what is open meanwhile, and the report at any end."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading

import jax
import rich.console

from experiments import report as report_page
from experiments.pipeline import Pipeline
from experiments.progress import Progress
from glm_jax.config import ConfigError, ExperimentConfig
from glm_jax.metrics import MetricsWriter
from glm_jax.parallel import make_mesh
from glm_jax.parallel.distributed import ALONE, Peers, check_devices, on_mesh
from glm_jax.rl.evaluation import Interrupted
from glm_jax.tracing import Tracer
from glm_jax.training.checkpoints import Checkpoints

EXIT_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}


def run(config: ExperimentConfig, directory: pathlib.Path, *, resume: bool, peers: Peers = ALONE) -> int:
    """Runs or resumes; the exit status: 0, or 128 + the signal that stopped it, in which case a checkpoint was left.

    Of several processes each calls this with the same directory, which all see; process 0 alone writes to it, and to the terminal. A signal
    that one of them gets stops all.
    """
    stop, received = threading.Event(), []

    def on_signal(number, _):
        if stop.is_set():  # the second time the person means it
            signal.default_int_handler(number, None)
        received.append(number)
        stop.set()
        peers.stop(number)

    previous = {number: signal.signal(number, on_signal) for number in EXIT_STATUS}
    peers.on_news(stop.set)
    tracer = Tracer(directory / "trace.json")
    try:
        mesh = mesh_of(config, peers)
        with contextlib.ExitStack() as stack:
            quiet = None if peers.first else rich.console.Console(file=stack.enter_context(open(os.devnull, "w")))
            progress = stack.enter_context(Progress(console=quiet))
            metrics = stack.enter_context(MetricsWriter(directory)) if peers.first else None
            saved = stack.enter_context(Checkpoints(directory / "checkpoints", config.checkpoint.keep, peers))
            stack.enter_context(on_mesh(mesh))
            pipeline = Pipeline(config, directory, progress, metrics, saved, tracer, stop, mesh, peers)
            try:
                pipeline.run(resume)
            except Interrupted:
                pipeline.save()
                progress.log(f"stopped; go on with: python -m experiments.run --resume {directory}")
                return EXIT_STATUS[received[0] if received else peers.stopped_by()]
            except BaseException as error:  # told before anything is closed: closing may wait for the others
                peers.fail(f"{type(error).__name__}: {error}")
                raise
        return 0
    finally:
        if peers.first:
            tracer.save()
            report_page.build(directory)
            print(f"report: {directory / 'report.html'}", flush=True)
        for number, handler in previous.items():
            signal.signal(number, handler)


def mesh_of(config: ExperimentConfig, peers: Peers) -> jax.sharding.Mesh | None:
    """The mesh that the config asks for. ConfigError when there are not as many devices."""
    try:
        mesh = make_mesh(**config.mesh.sizes) if config.mesh.devices > 1 else None
        check_devices(mesh, peers)
    except ValueError as error:
        raise ConfigError(f"mesh: {error}") from error
    return mesh
