"""Checkpoints of a run over Orbax: device arrays, a JSON document and numpy payloads, all or nothing."""

from __future__ import annotations

import io
import json as json_module
import os
import pathlib
import threading
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from glm_jax.parallel.distributed import ALONE, Peers, hosts_sharding

# What reading a damaged checkpoint raises: tensorstore and JSON ValueError, a missing item KeyError or OSError, a damaged npz BadZipFile.
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
_PAYLOADS = ("npz", "lengths")  # uint8 [processes, bytes], int64 [processes]


class CheckpointMismatch(RuntimeError):
    """A checkpoint that is sound but is not of this template."""


class Checkpoints:
    """The newest `keep` checkpoints in `directory`, which is created if need be.

    A checkpoint is written to a temporary directory and renamed when it is complete. `save` returns when the arrays have been copied, and a
    thread writes them; what goes wrong there is raised by the next call of any method. `close`, or leaving the `with` block, waits for it.
    Of several processes each calls every method, with the same arguments but for its own payloads; the directory must be one that all see.

    Any thread may call any method. A signal handler must not: let it set a flag or raise, and save from the main thread after that.
    """

    def __init__(self, directory: str | os.PathLike, keep: int, peers: Peers = ALONE):
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest checkpoint is kept")
        self._directory, self._peers = pathlib.Path(directory).absolute(), peers
        self._lock = threading.RLock()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep), cleanup_tmp_directories=True, save_root_metadata=False
        )
        # Named, so that items can be described before anything was saved or restored by this object.
        handlers = {
            "arrays": ocp.PyTreeCheckpointHandler(),
            "json": ocp.JsonCheckpointHandler(),
            "payloads": ocp.PyTreeCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(self._directory, options=options, item_names=tuple(handlers), item_handlers=handlers)

    def save(self, step: int, arrays: Any, json: Mapping, payloads: Mapping[str, np.ndarray] | None = None) -> bool:
        """Saves a pytree of jax or numpy arrays, a JSON-able mapping, and arrays of any shapes, empty ones too, by name.

        Payloads are the process's own, under names that no other process uses; restoring gives every process those of all.
        The caller may donate or overwrite everything when this returns. False, and nothing is done, when there is a checkpoint of this
        step: it is as good, since a checkpoint is complete in itself. Otherwise `step` must be higher than that of every checkpoint.
        """
        document = json_module.loads(json_module.dumps(json))  # a copy, and an error here rather than in the thread
        packed = io.BytesIO()
        np.savez(packed, allow_pickle=False, **(payloads or {}))
        with self._lock:
            self.wait()
            latest = self.latest()
            if latest == step:
                return False
            if latest is not None and step < latest:
                raise ValueError(f"a checkpoint of step {step} after one of step {latest} in {self._directory} would be the first to go")
            items = ocp.args.Composite(
                arrays=ocp.args.PyTreeSave({name: _snapshot(leaf) for name, leaf in _stored(_named(arrays)).items()}),
                json=ocp.args.JsonSave(document),
                payloads=ocp.args.PyTreeSave(self._packed(packed.getbuffer())),
            )
            return self._manager.save(step, args=items, force=True)

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint; None when there is none."""
        with self._lock:
            self.wait()
            return self._manager.latest_step()

    def restore(self, step: int, template: Any) -> tuple[Any, dict, dict[str, np.ndarray]]:
        """(arrays, json, payloads) of the checkpoint of `step`.

        template: pytree of jax.ShapeDtypeStruct or arrays, of the saved structure, shapes and dtypes. A leaf with a sharding (an array:
        committed to one) is restored to it, one without as an uncommitted array, a numpy leaf as numpy. The arrays are equal to the saved
        ones bit for bit, and their memory is their own.

        A checkpoint that cannot be read is renamed to "unreadable-STEP" with a RuntimeWarning, and the one before it is restored.
        FileNotFoundError when none is left; nothing is renamed then. CheckpointMismatch when one is sound but not of this template.
        Of several processes all restore the same one: what some process cannot read is unreadable.
        """
        with self._lock:
            self.wait()
            steps = sorted(self._manager.all_steps(), reverse=True)
            if step not in steps:
                raise FileNotFoundError(f"no checkpoint of step {step} in {self._directory}; there are {steps[::-1] or 'none'}")
            broken: dict[int, Exception] = {}
            for candidate in [s for s in steps if s <= step]:
                found, error = self._readable(candidate, template)
                if error is not None:
                    broken[candidate] = error
                    warnings.warn(
                        f"CHECKPOINT UNREADABLE: step {candidate} in {self._directory}, {type(error).__name__}: {_first_line(error)}",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                    continue
                self._set_aside(broken)
                return self._placed(found, template)
            raise FileNotFoundError(f"none of the checkpoints {list(broken)} in {self._directory} can be read") from broken[step]

    def wait(self) -> None:
        """Returns when the last checkpoint is complete; raises what went wrong with it."""
        with self._lock:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        """Waits, and ends Orbax's threads."""
        with self._lock:
            try:
                self.wait()
            finally:
                self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _readable(self, step: int, template: Any) -> tuple[Any, Exception | None]:
        """What is read, or why it cannot be: what went wrong here, or what another process says."""
        found, error = None, None
        try:
            found = self._read(step, template)
        except _UNREADABLE as caught:
            error = caught
        said = self._peers.gather(f"checkpoint {step} read", error and f"{type(error).__name__}: {_first_line(error)}")
        elsewhere = [f"process {process}: {text}" for process, text in enumerate(said) if text]
        return found, error or (OSError(elsewhere[0]) if elsewhere else None)

    def _read(self, step: int, template: Any) -> tuple[dict, dict, dict[str, np.ndarray]]:
        """(arrays by name, json, payloads) as Orbax gives them."""
        leaves = _named(template)
        stored = _stored(leaves)
        self._check(step, stored)
        shardings = {name: _sharding(leaf) for name, leaf in leaves.items()}
        items = self._manager.restore(
            step,
            args=ocp.args.Composite(
                arrays=ocp.args.PyTreeRestore(dict.fromkeys(stored, 0), restore_args={n: _restore_as(shardings[n]) for n in stored}),
                json=ocp.args.JsonRestore(),
                payloads=ocp.args.PyTreeRestore(dict.fromkeys(_PAYLOADS, 0), restore_args=dict.fromkeys(_PAYLOADS, _restore_as(None))),
            ),
        )
        payloads = {}
        for row, length in zip(items.payloads["npz"], items.payloads["lengths"], strict=True):
            with np.load(io.BytesIO(row[:length].tobytes()), allow_pickle=False) as archive:
                payloads |= archive
        return dict(items.arrays), items.json, payloads

    def _placed(self, found: tuple[dict, dict, dict[str, np.ndarray]], template: Any) -> tuple[Any, dict, dict[str, np.ndarray]]:
        leaves, (stored, document, payloads) = _named(template), found

        def own(name: str, leaf: Any) -> Any:
            """A copy: what Orbax made may lie over the memory that it read into, and an update donates its state."""
            array = stored.pop(name) if name in stored else np.zeros(leaf.shape, leaf.dtype)
            sharding = _sharding(leaf)
            if isinstance(leaf, np.ndarray | np.generic):
                return np.array(array)
            if sharding is None:
                return jnp.array(array)
            if self._peers.count > 1:
                return jax.jit(jnp.copy, out_shardings=sharding)(array)
            return jax.device_put(array, sharding, may_alias=False)

        arrays = jax.tree.unflatten(jax.tree.structure(template), [own(name, leaf) for name, leaf in leaves.items()])
        return arrays, document, payloads

    def _packed(self, mine: memoryview) -> dict[str, Any]:
        """Every process's payloads as a row of bytes: Orbax refuses empty arrays and arrays of strings."""
        lengths = np.array(self._peers.gather("checkpoint payloads", len(mine)))
        row = np.zeros((1, lengths.max()), np.uint8)
        row[0, : len(mine)] = mine
        if self._peers.count > 1:
            row = jax.make_array_from_process_local_data(hosts_sharding(), row, (self._peers.count, row.shape[1]))
        return {"npz": row, "lengths": lengths}

    def _check(self, step: int, leaves: Mapping[str, Any]) -> None:
        """Apart from reading, because a wrong template must not pass for a damaged checkpoint."""
        saved = self._manager.item_metadata(step).arrays
        if saved is None:
            raise FileNotFoundError(f"the checkpoint of step {step} has no arrays")
        describe = lambda leaf: "nothing" if leaf is None else f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"
        for name in dict.fromkeys([*leaves, *saved]):
            has, wants = describe(saved.get(name)), describe(leaves.get(name))
            if has != wants:
                raise CheckpointMismatch(f"step {step} in {self._directory}: {name} is {has} there and {wants} in the template")

    def _set_aside(self, steps: Mapping[int, Exception]) -> None:
        """Out of the way, so that training can save these steps again; kept, for whoever wants to know what happened."""
        if not steps:
            return
        if jax.process_index() == 0:
            for step in steps:
                place = self._directory / f"unreadable-{step}"
                number = 1
                while place.exists():
                    number += 1
                    place = self._directory / f"unreadable-{step}-{number}"
                (self._directory / str(step)).rename(place)
        self._manager.reload()


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by path, so that what is on disk does not depend on the classes of the tree."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves) or not named:
        raise ValueError("a checkpoint needs arrays, with paths that differ")
    return named


def _stored(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Those with entries: Orbax refuses empty arrays, such as the dense layers of a model that has none."""
    return {name: leaf for name, leaf in leaves.items() if leaf.size}


def _snapshot(leaf: Any) -> Any:
    """What a thread may read while the caller goes on. Orbax copies a device's memory to the host before `save` returns, but where the
    device is the host it keeps a view, and an array that somebody views cannot be donated."""
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    return jnp.copy(leaf) if any(device.platform == "cpu" for device in leaf.sharding.device_set) else leaf


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """None: a numpy array, or one that is on no device in particular."""
    placed = not isinstance(leaf, np.ndarray | np.generic) and getattr(leaf, "committed", True)
    return leaf.sharding if placed else None


def _restore_as(sharding: jax.sharding.Sharding | None) -> ocp.RestoreArgs:
    return ocp.RestoreArgs(restore_type=np.ndarray) if sharding is None else ocp.ArrayRestoreArgs(sharding=sharding)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
