"""load_pretrained: a model put together from the tensors of a checkpoint, a piece at a time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.model.config import ModelConfig, MTPConfig
from glm_jax.model.huggingface import fp8
from glm_jax.model.huggingface.config import config_from_huggingface
from glm_jax.model.huggingface.files import CheckpointError, Stored, read_box, read_header
from glm_jax.model.huggingface.names import IGNORED, LAYER_NUMBER, MTP, Share, Tensor, tensors_of
from glm_jax.model.transformer import Transformer
from glm_jax.parallel import sharding_of

PIECE = 1 << 20  # entries of a tensor that are handled at once
READERS = min(8, os.cpu_count() or 1)
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

Box = Sequence[tuple[int, int]]  # (start, stop) by axis


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder as config.json and the headers of its files describe it."""

    folder: pathlib.Path
    raw: dict[str, Any]  # config.json
    stored: dict[str, Stored]
    problems: list[str]

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share an FP8 scale."""
        return tuple((self.raw.get("quantization_config") or {}).get("weight_block_size") or fp8.BLOCK)

    def fused(self, layer: str) -> bool:
        return f"{layer}mlp.experts.gate_up_proj" in self.stored


def load_pretrained(
    path: str | os.PathLike, dtype: Any = jnp.float32, *, mesh: jax.sharding.Mesh | None = None, with_mtp: bool = True,
    latent_norm_eps: float | None = None,
) -> Transformer:
    """The model in the folder `path`, its weights of type `dtype` (None: the one config.json names), router biases float32 always.

    Understands the architectures of huggingface.config.ARCHITECTURES; one safetensors file or several with an index; experts one by one or
    fused; float32, float16, bfloat16 and block-scaled FP8; with or without the MTP layer (`with_mtp=False` leaves it out; without its
    tensors `config.mtp` is None whatever config.json says). `latent_norm_eps` overrides MLAConfig's.

    On `mesh`, or the mesh that jax.set_mesh has set, every device gets its shard of each weight, and only what this process's devices need
    is read. Without a mesh the weights lie on the default device. Memory of the host: on a CPU the weights and a few pieces of some MB; on
    an accelerator one device's shard of one weight at a time.

    Raises CheckpointError, which lists every missing, unexpected, misshaped, truncated and unreadable tensor, before a weight is allocated.
    """
    checkpoint = open_checkpoint(pathlib.Path(path))
    config, tensors = understand(checkpoint, with_mtp)
    if latent_norm_eps is not None:
        if config.mla is None:
            raise ValueError("latent_norm_eps is of MLA, which this model does not have")
        config = dataclasses.replace(config, mla=dataclasses.replace(config.mla, latent_norm_eps=latent_norm_eps))
    if dtype is None:
        dtype = checkpoint.raw.get("dtype") or checkpoint.raw.get("torch_dtype") or "float32"
    if mesh is None and not jax.sharding.get_abstract_mesh().empty:
        mesh = jax.sharding.get_mesh()
    sources: dict[str, list[tuple[Tensor, Share]]] = {}
    for tensor in tensors.values():
        for share in tensor.shares:
            sources.setdefault(share.path, []).append((tensor, share))
    with concurrent.futures.ThreadPoolExecutor(READERS) as readers:
        def load(declared):
            kind = jnp.dtype(jnp.float32 if declared.path.endswith("router_bias") else dtype)
            assemble = functools.partial(_assemble, checkpoint, sources.get(declared.path, []), kind, readers)
            return _place(declared.shape, None if mesh is None else sharding_of(declared, mesh), assemble)

        return jax.tree.map(load, Transformer.declare_tree(config))


def open_checkpoint(folder: pathlib.Path) -> Checkpoint:
    """config.json and the headers of all files."""
    raw = _read_json(folder / "config.json")
    files = [SINGLE]
    if (folder / INDEX).is_file():
        listed = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
            raise CheckpointError(folder / INDEX, ["has no weight_map"])
        files = sorted(set(listed.values()))
    elif not (folder / SINGLE).is_file():
        raise CheckpointError(folder, [f"neither {SINGLE} nor {INDEX} is there"])
    stored: dict[str, Stored] = {}
    problems: list[str] = []
    for name in files:
        tensors, found = read_header(folder / name)
        problems += found
        problems += [f"twice        {tensor}: in {stored[tensor].file.name} and {name}" for tensor in tensors.keys() & stored.keys()]
        stored |= tensors
    return Checkpoint(folder, raw, stored, problems)


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(file, [error.strerror or str(error)]) from error
    except ValueError as error:
        raise CheckpointError(file, [f"is not JSON: {error}"]) from error
    if not isinstance(raw, dict):
        raise CheckpointError(file, ["is not a JSON object"])
    return raw


def understand(checkpoint: Checkpoint, with_mtp: bool) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model that a checkpoint holds, and its tensors. Raises CheckpointError with every discrepancy between the two."""
    try:
        config = config_from_huggingface(checkpoint.raw)
    except CheckpointError as error:
        raise CheckpointError(checkpoint.folder / "config.json", error.problems) from error
    stored = {name: s for name, s in checkpoint.stored.items() if not IGNORED.fullmatch(name)}
    config, beyond = _with_stored_mtp(config, stored)
    if not with_mtp:
        config, stored = dataclasses.replace(config, mtp=None), {name: s for name, s in stored.items() if name not in beyond}
    tensors = tensors_of(config, {d.path: d.shape for d in Transformer.declare(config)}, checkpoint.fused)
    problems, spare = list(checkpoint.problems), set(stored) - set(tensors)
    for name, tensor in tensors.items():
        if name not in stored:
            problems.append(f"missing      {name} {list(tensor.shape)}")
        elif stored[name].shape != tensor.shape:
            problems.append(f"misshaped    {name} {list(stored[name].shape)}; must be {list(tensor.shape)}")
        elif stored[name].dtype == "F8_E4M3" and len(tensor.shape) == 1:
            problems.append(f"unsupported  {name} {list(tensor.shape)}: F8_E4M3 is for matrices")
        elif stored[name].dtype == "F8_E4M3":
            name, shape = name + fp8.SCALE, fp8.scale_shape(tensor.shape, checkpoint.block)
            spare.discard(name)
            if name not in stored:
                problems.append(f"missing      {name} {list(shape)}")
            elif (found := stored[name]).shape != shape or found.dtype != "F32":
                problems.append(f"misshaped    {name} {list(found.shape)} {found.dtype}; must be {list(shape)} F32")
    spare = {name for name in spare if math.prod(stored[name].shape)}  # empty tensors: of shared experts that there are none of
    if config.tied_embeddings and "lm_head.weight" in spare and not problems:
        if _same(stored["lm_head.weight"], stored["model.embed_tokens.weight"]):
            spare.discard("lm_head.weight")
        else:
            problems.append("unexpected   lm_head.weight: differs from model.embed_tokens.weight, though tie_word_embeddings is true")
    problems += [f"unexpected   {name} {list(stored[name].shape)}" for name in sorted(spare)]
    if problems:
        raise CheckpointError(checkpoint.folder, problems)
    return config, tensors


def _with_stored_mtp(config: ModelConfig, stored: dict[str, Stored]) -> tuple[ModelConfig, set[str]]:
    """The configuration with an MTP layer if its tensors are there, and the names of all tensors beyond the last layer.

    transformers keeps num_nextn_predict_layers in configurations whose layer it did not save, and drops it from others.
    """
    name = f"model.layers.{config.layers}."
    beyond = {tensor for tensor in stored if (match := LAYER_NUMBER.match(tensor)) and int(match[1]) >= config.layers}
    if not any(name + suffix in beyond for suffix, _, _ in MTP):
        return dataclasses.replace(config, mtp=None), beyond
    own = any(name + suffix in beyond for suffix, _, weights in MTP if {"embedding", "head"} & set(weights))
    return dataclasses.replace(config, mtp=dataclasses.replace(config.mtp or MTPConfig(), own_embeddings=own)), beyond


def _same(one: Stored, other: Stored) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    step = max(PIECE // one.shape[1], 1)
    boxes = ([(at, min(at + step, one.shape[0])), (0, one.shape[1])] for at in range(0, one.shape[0], step))
    bits = lambda stored, box: read_box(stored, stored.shape, box).view(np.uint8)
    return all(np.array_equal(bits(one, box), bits(other, box)) for box in boxes)


def _place(shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, assemble: Callable[[Box], np.ndarray]) -> jax.Array:
    """The array whose part `box` is assemble(box), each part read once. One at a time is on its way from the host to a device.

    (jax.make_array_from_callback would hold all parts at once, and read those that several devices hold several times.)
    """
    if sharding is None:
        return jax.device_put(assemble([(0, size) for size in shape])).block_until_ready()
    devices_of: dict[tuple, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
        devices_of.setdefault(box, []).append(device)
    shards = []
    for box, devices in devices_of.items():
        part = assemble(box)
        shards += [jax.device_put(part, device).block_until_ready() for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _assemble(
    checkpoint: Checkpoint, sources: Sequence[tuple[Tensor, Share]], dtype: np.dtype, readers: concurrent.futures.Executor, box: Box,
) -> np.ndarray:
    """The part `box` of a weight, filled in from the tensors that hold it. Nothing else refers to the array: JAX may take it over."""
    part = _aligned_empty([stop - start for start, stop in box], dtype)

    def fill(source):
        for inside in _pieces(*source, box):
            _fill(checkpoint, part, box, *source, inside)

    for _ in readers.map(fill, sources):
        pass
    return part


def _aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Uninitialised, and aligned as JAX's CPU backend asks of memory that it takes over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _pieces(tensor: Tensor, share: Share, box: Box) -> Iterator[Box]:
    """The boxes of a tensor, by its fine axes and of about PIECE entries, that fill `box` of the weight."""
    inside = list(share.box)
    for axis, index, (start, stop) in zip(share.axis, share.index, box, strict=True):
        if axis is None:
            if not start <= index < stop:
                return
        else:
            first = share.box[axis][0]
            inside[axis] = (first + start, first + stop)
    (first, last), row = inside[0], math.prod(stop - start for start, stop in inside[1:])
    step = max(PIECE // max(row, 1), 1)
    for at in range(first, last, step):
        yield [(at, min(at + step, last)), *inside[1:]]


def _fill(checkpoint: Checkpoint, part: np.ndarray, box: Box, tensor: Tensor, share: Share, inside: Box) -> None:
    """Reads the box `inside` of a tensor into its place in `part`, which is `box` of the weight."""
    stored = checkpoint.stored[tensor.name]
    values = read_box(stored, tensor.axes, inside)
    if stored.dtype == "F8_E4M3":
        *before, rows, columns = tensor.numbers(inside)
        scale = checkpoint.stored[tensor.name + fp8.SCALE]
        wanted = [*((n[0], n[-1] + 1) for n in before), *((0, size) for size in scale.shape[-2:])]
        factors = fp8.spread(read_box(scale, scale.shape, wanted), rows, columns, checkpoint.block)
        values = fp8.dequantise(values, factors.reshape(values.shape))
    target = tuple(
        index - start if axis is None else slice(*(edge - share.box[axis][0] - start for edge in inside[axis]))
        for axis, index, (start, _) in zip(share.axis, share.index, box, strict=True))
    part[target] = values.transpose([axis for axis in share.axis if axis is not None])
