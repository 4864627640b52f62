"""safetensors files, read box by box and written piece by piece.

The safetensors library maps whole files into memory, where every page it touches counts as the process's own, and for NumPy it knows no
float8. The format is a length, a JSON header and the bytes. Here they are read with pread: no more is read, or held, than was asked for.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Sequence

import ml_dtypes
import numpy as np

DTYPES = {
    "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BYTES = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E5M2": 1, "F8_E8M0": 1} | {
    name: dtype.itemsize for name, dtype in DTYPES.items()}
PAGE, READ_AHEAD = 4096, 65536  # bytes: a piece of a row below the one is not worth a call if the row is no longer than the other


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written as asked. `problems` are the single findings, a line each."""

    def __init__(self, where: object, problems: Sequence[str], shown: int = 20):
        self.problems = list(problems)
        lines = self.problems[:shown] + ([f"and {len(self.problems) - shown} more"] if len(self.problems) > shown else [])
        super().__init__(f"{where}: " + (lines[0] if len(lines) == 1 else "\n  ".join([f"{len(self.problems)} problems", *lines])))


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file: `dtype` by its safetensors name, and where its bytes begin."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(file: pathlib.Path) -> tuple[dict[str, Stored], list[str]]:
    """The tensors of a file, and what is wrong with it: unreadable, cut short, or sizes that contradict each other."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 + length:
                return {}, [f"truncated    {file.name}: {size} bytes, less than its header"]
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries = {name: (str(e["dtype"]), tuple(map(int, e["shape"])), *map(int, e["data_offsets"])) for name, e in header.items()}
    except OSError as error:
        return {}, [f"unreadable   {file.name}: {error.strerror}"]
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}, [f"unreadable   {file.name}: not a safetensors file (its header is no table of tensors)"]
    tensors, problems = {}, []
    for name, (dtype, shape, start, stop) in entries.items():
        tensors[name] = Stored(file, dtype, shape, 8 + length + start)
        if dtype not in DTYPES:
            problems.append(f"unsupported  {name} {list(shape)}: dtype {dtype}; supported are {', '.join(DTYPES)}")
        if dtype in BYTES and stop - start != math.prod(shape) * BYTES[dtype] or start < 0:
            problems.append(f"unreadable   {name} {list(shape)}: {stop - start} bytes in {file.name}, which is not its size as {dtype}")
        elif 8 + length + stop > size:
            problems.append(f"truncated    {name} {list(shape)}: {file.name} ends {8 + length + stop - size} bytes before it does")
    return tensors, problems


def read_box(stored: Stored, shape: Sequence[int], box: Sequence[tuple[int, int]]) -> np.ndarray:
    """The part of a tensor that is `box`, (start, stop) by axis of `shape`, a finer view of the tensor's own shape. A fresh array.

    One call for each contiguous run, and not a byte outside the box, except that short runs are read together with what lies between them.
    """
    dtype = DTYPES[stored.dtype]
    wide, axis, run = list(box), len(shape), dtype.itemsize
    while axis and wide[axis:] == [(0, size) for size in shape[axis:]]:
        axis -= 1
        start, stop = wide[axis]
        several = math.prod(stop - start for start, stop in wide[:axis]) > 1
        if several and (stop - start) * run < PAGE and shape[axis] * run <= READ_AHEAD:
            wide[axis] = (0, shape[axis])
        run *= wide[axis][1] - wide[axis][0]
    raw = np.empty([stop - start for start, stop in wide], dtype)
    strides = [math.prod(shape[i + 1:]) * dtype.itemsize for i in range(len(shape))]
    first = stored.offset + sum(start * stride for (start, _), stride in zip(wide, strides, strict=True))
    flat = raw.reshape(-1).view(np.uint8)
    descriptor = os.open(stored.file, os.O_RDONLY)
    try:
        for number, index in enumerate(np.ndindex(*raw.shape[:axis])):
            into = flat[number * run : (number + 1) * run]
            _pread(descriptor, into, first + sum(i * stride for i, stride in zip(index, strides, strict=False)), stored.file)
    finally:
        os.close(descriptor)
    return raw[tuple(slice(start - at, stop - at) for (start, stop), (at, _) in zip(box, wide, strict=True))]


def _pread(descriptor: int, into: np.ndarray, offset: int, file: pathlib.Path) -> None:
    done = 0
    while done < into.nbytes:
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            raise CheckpointError(file, [f"truncated    the file ends at byte {offset + done}"])
        done += count


class Writer:
    """A new safetensors file of the given (name, dtype, shape), whose tensors are then written piece by piece in any order."""

    def __init__(self, file: pathlib.Path, tensors: Iterable[tuple[str, str, tuple[int, ...]]]):
        self._file, self._start, header, end = file, {}, {"__metadata__": {"format": "pt"}}, 0
        for name, dtype, shape in sorted(tensors, key=lambda entry: -BYTES[entry[1]]):  # widest first: every tensor is aligned
            self._start[name] = end
            end += math.prod(shape) * BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [self._start[name], end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._base = 8 + len(text)
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(self._base + end)

    def write(self, name: str, array: np.ndarray, at: int = 0) -> None:
        """Puts `array` into tensor `name`, beginning with its element number `at`."""
        with self._file.open("r+b") as stream:
            stream.seek(self._base + self._start[name] + at * array.dtype.itemsize)
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def finish(self) -> None:
        """Returns once the bytes are on the disk."""
        with self._file.open("r+b") as stream:
            os.fsync(stream.fileno())
