"""The text of a compiled program (HLO), read into instructions with their shapes, operands and attributes."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array; `hbm` is False for one that the compiler keeps in a faster memory (a layout with S(1) and so on)."""

    dtype: str
    dims: tuple[int, ...]
    hbm: bool

    @property
    def bytes(self) -> float:
        return math.prod(self.dims) * bits(self.dtype) / 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of the result, a tuple's in order
    operands: tuple[str, ...]
    text: str  # attributes, from behind the operands on; of a constant or parameter its argument

    def attribute(self, pattern: str) -> str | None:
        found = re.search(pattern, self.text)
        return found and found[1]

    @property
    def scope(self) -> str:
        """Where in the source program it comes from: names of functions and of named scopes."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it runs, but for a while's or a conditional's."""
        return tuple(re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", self.text))


@dataclasses.dataclass(frozen=True)
class Computation:
    instructions: dict[str, Instruction]
    root: str


@dataclasses.dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: str


def bits(dtype: str) -> int:
    """Of one number: s32 32, bf16 16, f8e4m3fn 8, pred 8, token 0."""
    if dtype == "pred":
        return 8
    width = re.search(r"\d+", dtype)
    return int(width[0]) if width else 0


def parse(text: str) -> Module:
    """The module that compiled.as_text() prints."""
    computations, entry = {}, None
    name, instructions, root = None, {}, None
    for line in text.splitlines():
        if line.startswith("}") and name is not None:
            computations[name] = Computation(instructions, root)
            name = None
        elif name is None:
            header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
            if header and "->" in line:
                name, instructions, root = header[2], {}, None
                entry = name if header[1] else entry
        elif " = " in line:
            instruction = _instruction(line)
            instructions[instruction.name] = instruction
            root = instruction.name if line.lstrip().startswith("ROOT ") else root
    if entry is None:
        raise ValueError("the text holds no ENTRY computation: it is not a compiled program")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    left, right = line.split(" = ", 1)
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    opening = right.index("(", end)
    closing = _closing(right, opening)
    opcode, inside, rest = right[end:opening].strip(), right[opening + 1:closing], right[closing + 1:]
    shapes = tuple(
        Shape(dtype, tuple(int(d) for d in re.findall(r"\d+", dims)), re.search(r"S\([1-9]", layout or "") is None)
        for dtype, dims, layout in re.findall(r"(\w+)\[([\d,<=]*)\](\{[^}]*\})?", right[:end]))
    literal = opcode in ("constant", "parameter")
    operands = () if literal else tuple(re.findall(r"%?([\w.\-]+)(?:,|$)", re.sub(r"/\*.*?\*/|\{[^}]*\}|\[[^\]]*\]", "", inside)))
    return Instruction(left.split()[-1].lstrip("%"), opcode, shapes, operands, inside if literal else rest)


def _closing(text: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"no closing parenthesis in {text[opening:opening + 80]!r}")


def product_flops(instruction: Instruction, operands: list[Shape]) -> float:
    """FLOPs of a dot or a convolution, two for each multiply-add; 0 for anything else."""
    if instruction.opcode == "dot":
        contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
        return 2 * math.prod(instruction.shapes[0].dims) * math.prod(operands[0].dims[int(d)] for d in (contracted or "").split(",") if d)
    if instruction.opcode != "convolution":
        return 0.0
    left, right, out = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.text).groups()
    window = instruction.attribute(r"window=\{([^}]*)\}") or ""
    sizes = lambda name, default: re.search(rf"(?:^| ){name}=([\dx_\-]+)", window)[1].split("x") if f"{name}=" in window else default
    spatial = sorted(label for label in left if label.isdigit())
    ones = ["1"] * len(spatial)
    stride, dilation, holes = sizes("stride", ones), sizes("lhs_dilate", ones), sizes("rhs_dilate", ones)
    pads = sizes("pad", ["0_0"] * len(spatial))
    positions = 1
    for i, label in enumerate(spatial):
        positions *= _valid(
            operands[0].dims[left.index(label)], operands[1].dims[right.index(label)], instruction.shapes[0].dims[out.index(label)],
            int(stride[i]), int(pads[i].split("_")[0]), int(dilation[i]), int(holes[i]))
    groups = int(instruction.attribute(r"feature_group_count=(\d+)") or 1), int(instruction.attribute(r"batch_group_count=(\d+)") or 1)
    features = operands[0].dims[left.index("f")] // groups[0] * instruction.shapes[0].dims[out.index("f")]
    return 2.0 * features * operands[0].dims[left.index("b")] // groups[1] * positions


@functools.lru_cache(maxsize=4096)
def _valid(size: int, window: int, out: int, stride: int, pad: int, dilation: int, holes: int) -> int:
    """Pairs of a window's place and an output's that meet an entry of the operand, not padding and not a gap of its dilation.

    A batched product is compiled to such a convolution, whose every output meets one entry.
    """
    count, ends = 0, np.arange(out, dtype=np.int64) * stride - pad
    for k in range(window):
        places = ends + k * holes
        count += int(((places >= 0) & (places % dilation == 0) & (places // dilation < size)).sum())
    return count


def first_group(instruction: Instruction, devices: int) -> tuple[int, ...]:
    """The devices of a collective's first group, in its three notations: lists, an iota, axes of a mesh. All groups have one size."""
    text = instruction.text
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return tuple(int(d) for d in found[1].split(","))
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        numbers = lambda group: [int(n) for n in found[group].split(",")]
        ids = np.arange(math.prod(numbers(2))).reshape(numbers(2))
        return tuple((ids.transpose(numbers(3)) if found[3] else ids).reshape(numbers(1))[0].tolist())
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        ids = np.arange(math.prod(sizes.values()))
        if found[2]:
            ids = ids.reshape([int(n) for n in found[2].split(",")])
            ids = ids.transpose([int(n) for n in found[3].split(",")]) if found[3] else ids
        ids, used = ids.reshape(list(sizes.values())), re.findall(r"'(\w+)'", found[4])
        return tuple(ids[tuple(slice(None) if name in used else 0 for name in sizes)].reshape(-1).tolist())
    if found := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", text):
        return int(found[1]), int(found[2])
    return tuple(range(devices))
