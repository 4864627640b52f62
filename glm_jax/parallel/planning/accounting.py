"""What a compiled program does in one step on one device, read from its text: FLOPs, HBM traffic, and what it sends to others.

Counted, with loops by their trips:
- FLOPs of matrix products (dots and convolutions, inside fusions too), two for each multiply-add, as compiled: what rematerialisation
  computes again and what blocks are padded with counts. A custom call (a Pallas kernel) counts with the estimate it carries. Elementwise
  work, sorts and gathers count as HBM traffic only.
- HBM bytes of the operands and results of every instruction that are in HBM, a fusion being one instruction: what the compiler keeps in
  VMEM does not count, and of an operand that is only sliced the slice does. Tiles' padding and a sort's repeated passes are left out.
- Collective bytes that a device sends, with n devices in a group and an array of S bytes before (after) the split: all-gather and
  reduce-scatter (n-1)/n S, all-reduce twice that, all-to-all (n-1)/n S, collective-permute S.
A loop has the trips of its compiled condition; one whose length depends on data those that its scope says, expected_trips_N; one that says
nothing counts once and is listed in `unknown`. Of a conditional's two branches the true one has the share that its scope says,
expected_share_N_of_M; without one the branch with the most FLOPs counts.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re

from glm_jax.parallel.planning.hlo import Computation, Instruction, Module, Shape, first_group, parse, product_flops

COLLECTIVES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1, "ragged-all-to-all": 1, "collective-permute": 1}
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "iota", "opt-barrier",
    "add-dependency", "domain"}


@dataclasses.dataclass
class Work:
    """Per device and step; `collectives` are bytes sent, by kind and group of devices."""

    flops: float = 0.0
    hbm_bytes: float = 0.0
    collectives: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    unknown: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: Work, times: float = 1.0) -> None:
        self.flops += times * other.flops
        self.hbm_bytes += times * other.hbm_bytes
        for name in ("collectives", "unknown"):
            for key, value in getattr(other, name).items():
                getattr(self, name)[key] += times * value

    def sent(self) -> dict[str, float]:
        """Collective bytes by kind."""
        total = collections.Counter()
        for (kind, _), size in self.collectives.items():
            total[kind] += size
        return dict(total)


def account(text: str, devices: int) -> Work:
    """The work of a program over so many devices, given as compiled.as_text()."""
    return _Reader(parse(text), devices).work(None)


class _Reader:
    def __init__(self, module: Module, devices: int):
        self.module, self.devices = module, devices
        self.work = functools.cache(self._work)

    def _work(self, name: str | None) -> Work:
        total = Work()
        computation = self.module.computations[name or self.module.entry]
        for instruction in computation.instructions.values():
            total.add(self._one(instruction, computation))
        return total

    def _one(self, instruction: Instruction, computation: Computation) -> Work:
        opcode = instruction.opcode
        if opcode == "while":
            return self._loop(instruction, computation)
        if opcode == "conditional":
            return self._branches(instruction)
        if opcode in _FREE or opcode.endswith(("-done", "-update")):
            return Work()
        total = Work()
        if opcode in ("call", "call-start", "async-start"):
            for called in instruction.called:
                total.add(self.work(called))
            return total
        total.hbm_bytes = self._traffic(instruction, computation)
        self._compute(instruction, computation, total)
        return total

    def _compute(self, instruction: Instruction, computation: Computation, total: Work, scatters: bool = False) -> None:
        """Adds products and collectives, of a fusion those inside it. On TPU a reduce-scatter is a fusion of an all-reduce and a slice of
        it, called all-reduce-scatter: inside one `scatters` is true."""
        operands = _operands(instruction, computation)
        kind = instruction.opcode.removesuffix("-start")
        kind = "reduce-scatter" if scatters and kind == "all-reduce" else kind
        if kind in COLLECTIVES:
            group = first_group(instruction, self.devices)
            whole = sum(s.bytes for s in (operands if kind != "all-gather" else _results(instruction)))
            part = 1 if kind == "collective-permute" else (len(group) - 1) / len(group)
            total.collectives[kind, group] += COLLECTIVES[kind] * part * whole
        elif kind == "custom-call":
            estimate = re.search(r'"cost_estimate":\{"flops":"?(\d+)', instruction.text.replace(" ", ""))
            total.flops += float(estimate[1]) if estimate else 0.0
            target = instruction.attribute(r'custom_call_target="([^"]*)"')
            if target == "tpu_custom_call" and not estimate:
                total.unknown[f"custom call {instruction.name} without a cost estimate"] += 1
        elif kind == "fusion":
            for called in instruction.called:
                inner = self.module.computations[called]
                for each in inner.instructions.values():
                    self._compute(each, inner, total, scatters=called.startswith("all-reduce-scatter"))
        else:
            total.flops += product_flops(instruction, operands)

    def _loop(self, instruction: Instruction, computation: Computation) -> Work:
        body, condition = (instruction.attribute(rf"{part}=%?([\w.\-]+)") for part in ("body", "condition"))
        trips = self._trips(instruction, computation, condition)
        total = Work()
        if trips is None:
            total.unknown[f"loop {instruction.scope or instruction.name}"] += 1
        for part in (body, condition):
            total.add(self.work(part), 1 if trips is None else trips)
        return total

    def _trips(self, instruction: Instruction, computation: Computation, condition: str) -> int | None:
        """From the compiler's own note, else from `i < bound` of the condition, both known at compile time, else from the loop's scope."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.text):
            return int(known[1])
        inner = self.module.computations[condition]
        test, start = inner.instructions[inner.root], computation.instructions.get(instruction.operands[0])
        if test.opcode == "fusion":  # the comparison, fused
            fused = self.module.computations[test.called[0]]
            outer = [inner.instructions[name] for name in test.operands]
            test = fused.instructions[fused.root]
            sides = [fused.instructions[name] for name in test.operands]
            sides = [outer[int(side.text)] if side.opcode == "parameter" else side for side in sides]
        else:
            sides = [inner.instructions[name] for name in test.operands]
        values = [self._value(side, start, computation) for side in sides]
        direction = test.attribute(r"direction=(\w+)")
        if test.opcode == "compare" and direction in ("LT", "GT") and None not in values:
            return max(values[1] - values[0] if direction == "LT" else values[0] - values[1], 0)
        scope = re.findall(r"expected_trips_(\d+)", instruction.scope)
        return int(scope[-1]) if scope else None

    def _value(self, side: Instruction, start: Instruction | None, computation: Computation) -> int | None:
        """A constant of the condition, or the value that a loop's variable starts with."""
        if side.opcode == "get-tuple-element" and start is not None and start.opcode == "tuple":
            side = computation.instructions[start.operands[int(side.attribute(r"index=(\d+)"))]]
        while side.opcode in ("copy", "bitcast") and side.operands[0] in computation.instructions:
            side = computation.instructions[side.operands[0]]
        return int(side.text) if side.opcode == "constant" and re.fullmatch(r"-?\d+", side.text) else None

    def _branches(self, instruction: Instruction) -> Work:
        listed = instruction.attribute(r"branch_computations=\{([^}]*)\}")
        if listed:
            names = [name.strip().lstrip("%") for name in listed.split(",")]
        else:
            names = [instruction.attribute(rf"{which}_computation=%?([\w.\-]+)") for which in ("false", "true")]
        share = re.findall(r"expected_share_(\d+)_of_(\d+)", instruction.scope)
        total = Work()
        if share and len(names) == 2:
            true = int(share[-1][0]) / int(share[-1][1])
            total.add(self.work(names[0]), 1 - true)
            total.add(self.work(names[1]), true)
        else:
            total.add(max((self.work(name) for name in names), key=lambda work: work.flops))
        return total

    def _traffic(self, instruction: Instruction, computation: Computation) -> float:
        """HBM bytes of one instruction: its operands as far as they are read, its result as far as it is written."""
        opcode, operands = instruction.opcode, _operands(instruction, computation)
        if opcode == "fusion":
            inner = self.module.computations[instruction.called[0]]
            parameters = {int(i.text): i.name for i in inner.instructions.values() if i.opcode == "parameter"}
            read = [s.bytes if (part := self._read(inner, parameters[n])) is None else part for n, s in enumerate(operands)]
            written = self._written(inner, inner.root, instruction.shapes)
            return sum(size for size, s in zip(read, operands, strict=True) if s.hbm) + written
        if opcode == "copy-start":
            return sum(s.bytes for s in instruction.shapes[:2] if s.hbm)
        result = sum(s.bytes for s in _results(instruction) if s.hbm)
        if opcode in ("dynamic-slice", "slice", "gather"):
            return (result if operands[0].hbm else 0) + result
        if opcode in ("dynamic-update-slice", "scatter"):
            update = operands[1 if opcode == "dynamic-update-slice" else 2]
            return 2 * update.bytes
        return sum(s.bytes for s in operands if s.hbm) + result

    def _read(self, computation: Computation, name: str) -> float | None:
        """Bytes that a fusion reads of a parameter of which it takes slices only; None where it takes it whole."""
        total = 0.0
        for user in computation.instructions.values():
            if name not in user.operands:
                continue
            if user.opcode == "bitcast":
                part = self._read(computation, user.name)
            elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
                part = user.shapes[0].bytes
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                part = 0.0
            elif user.opcode == "scatter" and user.operands[0] == name:
                part = computation.instructions[user.operands[-1]].shapes[0].bytes
            elif user.opcode == "fusion":
                inner = self.module.computations[user.called[0]]
                parameters = {int(i.text): i.name for i in inner.instructions.values() if i.opcode == "parameter"}
                parts = [self._read(inner, parameters[n]) for n, operand in enumerate(user.operands) if operand == name]
                part = None if None in parts else sum(parts)
            else:
                part = None
            if part is None:
                return None
            total += part
        return total

    def _written(self, computation: Computation, name: str, shapes: tuple[Shape, ...]) -> float:
        """Bytes of a fusion's result: of an operand that is updated where it is, the update."""
        instruction = computation.instructions[name]
        if instruction.opcode == "tuple" and len(instruction.operands) == len(shapes):
            return sum(self._written(computation, part, (shape,)) for part, shape in zip(instruction.operands, shapes, strict=True))
        if instruction.opcode == "bitcast" and instruction.operands[0] in computation.instructions:
            return self._written(computation, instruction.operands[0], shapes)
        if instruction.opcode == "dynamic-update-slice" and all(s.hbm for s in shapes):
            return computation.instructions[instruction.operands[1]].shapes[0].bytes
        if instruction.opcode == "scatter" and len(shapes) == 1 and self._is_operand(computation, instruction.operands[0]):
            return computation.instructions[instruction.operands[-1]].shapes[0].bytes
        return sum(s.bytes for s in shapes if s.hbm)

    def _is_operand(self, computation: Computation, name: str) -> bool:
        """Whether it is one of a fusion's operands, or another view of one."""
        instruction = computation.instructions[name]
        while instruction.opcode == "bitcast":
            instruction = computation.instructions[instruction.operands[0]]
        return instruction.opcode == "parameter"


def _operands(instruction: Instruction, computation: Computation) -> list[Shape]:
    return [s for name in instruction.operands for s in computation.instructions[name].shapes]


def _results(instruction: Instruction) -> tuple[Shape, ...]:
    """A -start's result is (operands, results, contexts): its results; of any other all."""
    if not instruction.opcode.endswith("-start") or len(instruction.shapes) < 2:
        return instruction.shapes
    arrays = [s for s in instruction.shapes if s.dtype not in ("u32", "s32") or s.dims]
    return tuple(arrays[len(arrays) // 2:])
