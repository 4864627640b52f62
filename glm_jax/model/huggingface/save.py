"""save_pretrained: a model taken apart into the tensors of a checkpoint, a piece at a time."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.model.config import ModelConfig
from glm_jax.model.huggingface import fp8 as fp8_blocks
from glm_jax.model.huggingface.config import EXTENSIONS, config_from_huggingface, config_to_huggingface
from glm_jax.model.huggingface.files import DTYPES, NAMES, CheckpointError, Writer, read_box
from glm_jax.model.huggingface.load import INDEX, PIECE, SINGLE, Box, Checkpoint, open_checkpoint, understand
from glm_jax.model.huggingface.names import IGNORED, Tensor, tensors_of
from glm_jax.model.transformer import Transformer

COMPANIONS = (".json", ".jinja", ".txt", ".model")  # tokenizer, chat template, generation settings


@dataclasses.dataclass(frozen=True)
class Form:
    """How a checkpoint is written: its tensors, the type and the file of each, and what stands beside them."""

    raw: dict[str, Any]  # config.json
    tensors: dict[str, Tensor]
    dtypes: dict[str, str]
    files: dict[str, str]  # by name, FP8 scales included
    block: tuple[int, int] = fp8_blocks.BLOCK
    like: Checkpoint | None = None
    carried: Sequence[str] = ()  # of `like`, tensors that are no weights


def save_pretrained(
    model: Transformer, path: str | os.PathLike, *, like: str | os.PathLike | None = None, dtype: Any = None, fused_experts: bool = False,
    fp8: bool = False, shard_bytes: int = 5 * 2**30, overwrite: bool = False,
) -> None:
    """Writes the model to the folder `path`, which appears complete or not at all.

    like            a checkpoint whose form to take: names, types, FP8 tensors, division into files, config.json, tokenizer files. A model
                    loaded from it comes back bit for bit, if loaded with a type that holds its values (for FP8, any does)
    dtype           of the tensors, without `like`; None: the weights' own. Router biases are float32 always
    fused_experts   the experts of a layer in two tensors, as transformers 5 holds them, in place of three for each expert
    fp8             linear layers as float8 with a float32 factor for each 128 x 128 block, the rest as `dtype`.
                    huggingface.fp8.quantise says which checkpoints come back bit for bit even without `like`
    shard_bytes     a further file is begun where one would grow larger
    overwrite       replace the checkpoint at `path`, the whole folder

    The host holds a few pieces of some MB besides the model.

    Raises CheckpointError when `path` is in use or `like` holds another model, ValueError for options that exclude each other, and for a
    model whose weights are not those of its config or not all on this process's devices.
    """
    path = pathlib.Path(path)
    if like is not None and (dtype is not None or fused_experts or fp8):
        raise ValueError("`like` says what form the checkpoint takes: dtype, fused_experts and fp8 go without it")
    if in_use := path.exists() and not (path.is_dir() and not any(path.iterdir())):
        if not overwrite:
            raise CheckpointError(path, ["exists; overwrite=True replaces it"])
        if not (path / "config.json").is_file():
            raise CheckpointError(path, ["exists and is no checkpoint (it has no config.json): not overwritten"])
    declared, leaves = Transformer.declare(model.config), jax.tree.leaves(model)
    if [d.shape for d in declared] != [leaf.shape for leaf in leaves]:
        raise ValueError("the model's weights are not those of its config")
    weights = {d.path: leaf for d, leaf in zip(declared, leaves, strict=True)}
    if away := [name for name, leaf in weights.items() if not leaf.is_fully_addressable]:
        raise ValueError(f"{len(away)} weights, {away[0]} among them, are partly on other processes' devices: gather the model first")
    if like is None:
        form = _new_form(model.config, weights, dtype, fused_experts, fp8, shard_bytes)
    else:
        form = _form_of(pathlib.Path(like), model.config)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        scratch.mkdir()
        _write(form, weights, scratch)
        _publish(scratch, path, in_use)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _new_form(config: ModelConfig, weights: dict[str, jax.Array], dtype: Any, fused: bool, fp8: bool, shard_bytes: int) -> Form:
    tensors = tensors_of(config, {path: w.shape for path, w in weights.items()}, lambda layer: fused)
    dtypes = {}
    for name, tensor in tensors.items():
        path = tensor.shares[0].path
        kind = jnp.dtype(jnp.float32 if path.endswith("router_bias") else dtype or weights[path].dtype)
        if kind not in NAMES or kind.itemsize == 1:
            raise ValueError(f"{path}: tensors of dtype {kind} are not written; float32, float16 and bfloat16 are, and fp8=True")
        dtypes[name] = "F8_E4M3" if fp8 and tensor.may_be_fp8 else NAMES[kind]
    numbers, number, filled = {}, 0, 0
    for name, tensor in tensors.items():
        size = sum(math.prod(shape) * DTYPES[kind].itemsize for _, kind, shape in _entries(tensor, dtypes[name], fp8_blocks.BLOCK))
        if filled and filled + size > shard_bytes:
            number, filled = number + 1, 0
        filled += size
        numbers[name] = number
    names = [f"model-{i + 1:05}-of-{number + 1:05}.safetensors" for i in range(number + 1)] if number else [SINGLE]
    files = {entry: names[numbers[name]] for name in tensors for entry in (name, name + fp8_blocks.SCALE)}
    raw = config_to_huggingface(config) | {"dtype": jnp.dtype(dtype or weights["embedding"].dtype).name}
    if fp8:
        raw["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(fp8_blocks.BLOCK), "activation_scheme": "dynamic",
            "modules_to_not_convert": sorted(
                name.removesuffix(".weight") for name, tensor in tensors.items() if len(tensor.shape) > 1 and not tensor.may_be_fp8)}
    return Form(raw, tensors, dtypes, files)


def _form_of(folder: pathlib.Path, config: ModelConfig) -> Form:
    """The form of a checkpoint, for the same model or that model without its MTP layer or with other settings of our own."""
    like = open_checkpoint(folder)
    theirs, tensors = understand(like, config.mtp is not None)
    raw = dict(like.raw)
    if theirs != config:
        own = config_to_huggingface(config)
        raw = {key: value for key, value in raw.items() if key not in EXTENSIONS} | {key: own[key] for key in EXTENSIONS if key in own}
        if config_from_huggingface(raw) != config:
            raise CheckpointError(folder, [f"holds another model: {theirs}; the one to be written is {config}"])
    if config.tied_embeddings and "lm_head.weight" in like.stored:
        tensors["lm_head.weight"] = dataclasses.replace(tensors["model.embed_tokens.weight"], name="lm_head.weight")
    dtypes = {name: like.stored[name].dtype for name in tensors}
    files = {name: stored.file.name for name, stored in like.stored.items()}
    carried = [name for name, stored in like.stored.items() if IGNORED.fullmatch(name) or not math.prod(stored.shape)]
    return Form(raw, tensors, dtypes, files, like.block, like, carried)


def _entries(tensor: Tensor, dtype: str, block: tuple[int, int]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of what is stored for a tensor."""
    yield tensor.name, dtype, tensor.shape
    if dtype == "F8_E4M3":
        yield tensor.name + fp8_blocks.SCALE, "F32", fp8_blocks.scale_shape(tensor.shape, block)


def _write(form: Form, weights: dict[str, jax.Array], folder: pathlib.Path) -> None:
    carried = {name: form.like.stored[name] for name in form.carried}
    entries = [entry for tensor in form.tensors.values() for entry in _entries(tensor, form.dtypes[tensor.name], form.block)]
    entries += [(name, stored.dtype, stored.shape) for name, stored in carried.items()]
    by_file: dict[str, list] = {}
    for entry in entries:
        by_file.setdefault(form.files[entry[0]], []).append(entry)
    writers = {file: Writer(folder / file, held) for file, held in by_file.items()}
    for tensor in form.tensors.values():
        _write_tensor(form, tensor, weights, writers)
    for name, stored in carried.items():
        writers[form.files[name]].write(name, read_box(stored, stored.shape, [(0, size) for size in stored.shape]))
    for writer in writers.values():
        writer.finish()
    if list(writers) != [SINGLE]:
        total = sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in entries)
        index = {"metadata": {"total_size": total}, "weight_map": {name: form.files[name] for name, _, _ in sorted(entries)}}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(form.raw, indent=2) + "\n")
    for file in form.like.folder.iterdir() if form.like is not None else ():
        if file.suffix in COMPANIONS and file.is_file() and file.name not in ("config.json", INDEX):
            shutil.copyfile(file, folder / file.name)


def _write_tensor(form: Form, tensor: Tensor, weights: dict[str, jax.Array], writers: dict[str, Writer]) -> None:
    """A tensor, some entries of its first axis at a time; of an FP8 matrix, whole blocks of rows."""
    dtype, scale, width = form.dtypes[tensor.name], tensor.name + fp8_blocks.SCALE, math.prod(tensor.axes[1:])
    step = max(PIECE // width, 1)
    if blocks := dtype == "F8_E4M3" and len(tensor.shape) == 2:
        rows = width // tensor.shape[1]  # of the matrix, for each entry of the first axis
        whole = form.block[0] // math.gcd(form.block[0], rows)
        step = math.ceil(step / whole) * whole
    for at in range(0, tensor.axes[0], step):
        values = _gather(tensor, [(at, min(at + step, tensor.axes[0])), *((0, size) for size in tensor.axes[1:])], weights)
        if dtype == "F8_E4M3":
            values = values.reshape(-1, *tensor.shape[1:])
            first = at * rows // form.block[0] if blocks else at  # entry of the scale's first axis
            values, factors = fp8_blocks.quantise(values, form.block, _known(form, scale, first, values.shape))
            writers[form.files[scale]].write(scale, factors, first * math.prod(factors.shape[1:]))
        writers[form.files[tensor.name]].write(tensor.name, values.astype(DTYPES[dtype], copy=False), at * width)


def _known(form: Form, scale: str, first: int, shape: Sequence[int]) -> np.ndarray | None:
    """The scale that `form.like` stores for these rows."""
    if form.like is None:
        return None
    stored, wanted = form.like.stored[scale], fp8_blocks.scale_shape(shape, form.block)
    return read_box(stored, stored.shape, [(first, first + wanted[0]), *((0, size) for size in wanted[1:])])


def _gather(tensor: Tensor, inside: Box, weights: dict[str, jax.Array]) -> np.ndarray:
    """The box `inside` of a tensor, by its fine axes, from the weights that share it."""
    out = np.empty([stop - start for start, stop in inside], weights[tensor.shares[0].path].dtype)
    for share in tensor.shares:
        common = _common(inside, share.box)
        box = [(index, index + 1) if axis is None else tuple(edge - share.box[axis][0] for edge in common[axis])
               for axis, index in zip(share.axis, share.index, strict=True)]
        part = _to_host(weights[share.path], box)
        part = part.squeeze(tuple(at for at, axis in enumerate(share.axis) if axis is None))
        order = [axis for axis in share.axis if axis is not None]
        out[_within(common, inside)] = part.transpose(np.argsort(order))
    return out


def _to_host(weight: jax.Array, box: Box) -> np.ndarray:
    """The part `box` of a weight, from whichever devices hold it."""
    out = np.empty([stop - start for start, stop in box], weight.dtype)
    seen = set()
    for shard in weight.addressable_shards:
        held = tuple(s.indices(size)[:2] for s, size in zip(shard.index, weight.shape, strict=True))
        common = _common(box, held)
        if held not in seen and all(start < stop for start, stop in common):
            seen.add(held)
            out[_within(common, box)] = _slice(shard.data, _within(common, held))
    return out


def _common(one: Box, other: Box) -> list[tuple[int, int]]:
    return [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """`box` as an index into an array that holds `outer`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


def _slice(data: jax.Array, index: tuple[slice, ...]) -> np.ndarray:
    """A part of a single device's array. A CPU's memory is read in place; an accelerator cuts before it sends."""
    if _in_place(data):
        return np.asarray(data)[index]
    with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):  # the array is on one device, whatever mesh the caller has set
        return np.asarray(_cut(data, [s.start for s in index], tuple(s.stop - s.start for s in index)))


def _in_place(data: jax.Array) -> bool:
    return next(iter(data.devices())).platform == "cpu"


@functools.partial(jax.jit, static_argnums=2)
def _cut(data: jax.Array, starts: Sequence[int], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(data, starts, sizes)


def _publish(scratch: pathlib.Path, path: pathlib.Path, in_use: bool) -> None:
    """Puts the finished folder in its place; what was there goes last."""
    if not in_use:
        os.replace(scratch, path)
        return
    old = scratch.with_name(scratch.name + "-replaced")
    os.replace(path, old)
    try:
        os.replace(scratch, path)
    except OSError:
        os.replace(old, path)
        raise
    shutil.rmtree(old)
