"""python -m experiments.run NAME [a.b=v …]: one experiment, from its config to its report, in runs/NAME/TIME/."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments import config as configs
from glm_jax.config import ConfigError, ExperimentConfig

if TYPE_CHECKING:
    from glm_jax.parallel.distributed import Peers

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint", "grain", "gymnasium", "cereggii", "omegaconf", "libtpu")
INTERRUPTED = 130
# Keys that may change when a run goes on. Any other would leave a table whose columns, or a ring whose groups, are of different configs.
RESUMABLE = (
    "rl.updates", "rl.learning_rate", "rl.deadline_seconds", "rl.actor_threads", "rl.episodes", "engine.slots", "engine.decode_steps",
    "engine.prefill_rows", "engine.prefill_chunk", "checkpoint.every", "checkpoint.keep",
    *(f"mesh.{name}" for name in ("data", "fsdp", "expert", "context", "model", "timeout_seconds")))


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m experiments.run", description=__doc__)
    parse.add_argument("name", nargs="?", help="a config of experiments/configs (see --list)")
    parse.add_argument("overrides", nargs="*", metavar="a.b=v", help="change keys of the config, e.g. rl.updates=10 seed=1")
    parse.add_argument("--sweep", metavar="NAME", help="run every setting of the config's sweep_NAME(), in turn")
    parse.add_argument("--resume", metavar="DIR", help="go on from the run directory's last checkpoint, with its own config")
    parse.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    parse.add_argument("--dry-run", action="store_true", help="print shapes and estimates and stop; trains nothing, writes nothing")
    parse.add_argument("--list", action="store_true", help="list the configs and their sweeps")
    parse.add_argument("--debug", action="store_true", help="a small run of the config that stops at the first NaN, with full tracebacks")
    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for a mistake of the user, told in one line; what the pipeline returns otherwise."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parse = parser()
    arguments = parse.parse_intermixed_args(argv)
    try:
        return _main(parse, arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _main(parse: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.list:
        return list_configs()
    if arguments.name and "=" in arguments.name:  # --resume DIR a.b=v: the first override landed in the place of the name
        arguments.overrides, arguments.name = [arguments.name, *arguments.overrides], None
    if not arguments.name and not arguments.resume:
        parse.print_usage(sys.stderr)
        raise ConfigError(f"name a config: {', '.join(configs.list_configs())}")
    if arguments.sweep:
        if arguments.resume:
            raise ConfigError("--sweep and --resume: resume one run of the sweep by its own directory")
        return sweep(arguments)

    config = resolve(arguments)
    if arguments.print_config:
        print(configs.to_yaml(config), end="")
        return 0
    configs.check_environments(config)
    if arguments.debug:
        os.environ.setdefault("JAX_DEBUG_NANS", "True")
        os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")

    if arguments.dry_run:
        from experiments.describe import describe

        configs.model_config(config)
        describe(config)
        return 0
    # Before anything imports JAX: a process that runs JAX's threads is slow and unsafe to start others from.
    from glm_jax.environments import start_default_sandbox

    start_default_sandbox()
    from glm_jax.parallel import distributed

    try:
        peers = distributed.start(config.mesh.timeout_seconds)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        return start_run(arguments, config, peers)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:
        peers.fail(f"{type(error).__name__}: {error}")
        raise


def start_run(arguments: argparse.Namespace, config: ExperimentConfig, peers: Peers) -> int:
    """In every process: what can be refused is, process 0 makes the run directory, and the pipeline begins."""
    from experiments import lifecycle

    configs.model_config(config)
    config.share(peers.count)
    if peers.count > 1 or config.mesh.devices > 1:
        lifecycle.mesh_of(config, peers)
    directory = None
    if peers.first:
        directory = pathlib.Path(arguments.resume) if arguments.resume else new_run_directory(config)
        record_start(config, directory, arguments.overrides)
    directory = pathlib.Path(peers.gather("run directory", directory and str(directory.absolute() if peers.count > 1 else directory))[0])
    status = lifecycle.run(config, directory, resume=bool(arguments.resume), peers=peers)
    peers.close()
    return status


def resolve(arguments: argparse.Namespace) -> ExperimentConfig:
    """The config of the named module, or of the run to resume, with the overrides applied."""
    if not arguments.resume:
        return configs.load(arguments.name, arguments.overrides, debug=arguments.debug)
    if arguments.debug:
        raise ConfigError("--debug and --resume: a resumed run keeps the size it was started with")
    saved = configs.reload(pathlib.Path(arguments.resume) / "config.yaml")
    if arguments.name and arguments.name != saved.name:
        raise ConfigError(f"{arguments.resume} is a run of {saved.name!r}, not of {arguments.name!r}; the name can be left out")
    config = configs.override(saved, arguments.overrides)
    for text in arguments.overrides:
        key = text.partition("=")[0]
        if key not in RESUMABLE and configs.value(config, key) != configs.value(saved, key):
            raise ConfigError(
                f"{text}: this run was begun with {configs.value(saved, key)}; with --resume only {', '.join(RESUMABLE)} may change")
    return config


def list_configs() -> int:
    for name in configs.list_configs():
        summary = (configs.config_module(name).__doc__ or "").strip().partition("\n")[0]
        print(f"{name:<16} {summary}")
        for sweep_name, runs in configs.sweeps(name).items():
            print(f"{'':<16} --sweep {sweep_name} ({len(runs)} runs)")
    return 0


def sweep(arguments: argparse.Namespace) -> int:
    """Every setting in a process of its own, in turn: a run ends with its process's memory, and one that fails ends the sweep."""
    known = configs.sweeps(arguments.name)
    if arguments.sweep not in known:
        raise ConfigError(f"config {arguments.name!r} defines no sweep {arguments.sweep!r}: {configs.nearest(arguments.sweep, known)}")
    runs = [(*setting, *arguments.overrides) for setting in known[arguments.sweep]]
    for run in runs:  # a mistake in the last setting should not be found after hours
        configs.load(arguments.name, run, debug=arguments.debug)
    flags = [flag for flag in ("--print-config", "--dry-run", "--debug") if getattr(arguments, flag[2:].replace("-", "_"))]
    for number, run in enumerate(runs, 1):
        print(f"sweep {arguments.sweep} {number}/{len(runs)}: {' '.join(run)}", flush=True)
        status = subprocess.run([sys.executable, "-m", "experiments.run", arguments.name, *run, *flags], check=False).returncode
        if status:
            return status if status > 0 else 128 - status  # a negative one is the signal that ended it
    return 0


def new_run_directory(config: ExperimentConfig) -> pathlib.Path:
    """Make and return OUTPUT/NAME/TIME/; runs that start in the same second get -1, -2, …"""
    base = pathlib.Path(config.output) / config.name / datetime.datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    number, directory = 0, base
    while True:
        try:
            directory.mkdir(parents=True)
            return directory
        except FileExistsError:
            number += 1
            directory = base.with_name(f"{base.name}-{number}")
        except OSError as error:
            raise ConfigError(f"output={config.output}: cannot make {directory}: {error.strerror}") from error


def record_start(config: ExperimentConfig, directory: pathlib.Path, overrides: Sequence[str]) -> None:
    """Write config.yaml, and add this start to environment.json: a resumed run has one record a start."""
    configs.save(config, directory / "config.yaml")
    path = directory / "environment.json"
    starts = json.loads(path.read_text())["starts"] if path.exists() else []
    starts.append({"overrides": list(overrides), **environment()})
    path.write_text(json.dumps({"starts": starts}, indent=2) + "\n")


def environment() -> dict[str, object]:
    """When, with which code and on which machine: what is needed to tell two runs apart."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": versions,
    }


def git_revision() -> str | None:
    """The commit of this checkout, "-dirty" added when files differ from it; None outside a checkout."""
    root = pathlib.Path(__file__).parent

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        os.environ.setdefault("NPROC", "64")  # XLA's thread pool must be larger than the number of devices that wait for each other
    sys.exit(main())
