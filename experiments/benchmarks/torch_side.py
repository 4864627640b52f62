"""The other side of a comparison: transformers + torch in a process and a virtual environment of their own, never in the project's.

The environment is made when first asked for, in .cache/torch-venv of the repository (GLM_JAX_TORCH_VENV: elsewhere). A CPU build of torch
is enough; whether pip finds one is a matter of how pip is configured where this runs: on Linux PyPI's own wheel is the CUDA build, with
libraries of some GB that a comparison on CPU leaves alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from experiments.benchmarks.measure import BenchmarkError, progress

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
REQUIREMENTS = ("torch==2.13.0", "transformers==5.24.0")  # those that the golden cases were made with
# What is fair to torch on a machine that does other work too: threads that spin while they wait for each other cost it several times a
# step's time there, asleep they cost it nothing on a quiet machine either. And what measure.keep_freed_memory does for our process.
VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
WORKER = pathlib.Path(__file__).with_name("torch_worker.py")


def environment() -> pathlib.Path:
    """The python of an environment with REQUIREMENTS, which is made if it is not there. Raises BenchmarkError when it cannot be."""
    folder = pathlib.Path(os.environ.get("GLM_JAX_TORCH_VENV", REPOSITORY / ".cache" / "torch-venv"))
    python, mark = folder / "bin" / "python", folder / ".installed"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.is_file() and mark.read_text().split() == list(REQUIREMENTS):
            return python
        progress(f"installing {', '.join(REQUIREMENTS)} into {folder}, once")
        shutil.rmtree(folder, ignore_errors=True)
        pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        for command in ((sys.executable, "-m", "venv", folder), (*pip, *REQUIREMENTS)):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                shutil.rmtree(folder, ignore_errors=True)
                raise BenchmarkError(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}")
        mark.write_text("\n".join(REQUIREMENTS))
    return python


class TorchWorker:
    """A running `torch_worker.py`; its methods are called by name, arguments and results being JSON."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process

    def __call__(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Raises BenchmarkError when the worker fails or dies."""
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError(f"the torch process died at {do!r} with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(f"torch, {do}: {answer['error']}")
        return answer


@contextlib.contextmanager
def torch_worker() -> Iterator[TorchWorker]:
    """A torch process for as long as the context is open."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables = VARIABLES | variables | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
            [environment(), WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tempfile.gettempdir(), env=variables,
    ) as process:
        try:
            yield TorchWorker(process)
        finally:
            process.stdin.close()
            process.kill()
