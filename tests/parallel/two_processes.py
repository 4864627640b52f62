"""Two processes of four CPU devices each, over gloo, and what they and one process of eight compute in the tests."""

import functools
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def start(*command, count=2, devices=4, **environment):
    """`command` (arguments of the Python interpreter) in `count` processes that find each other."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    settings = os.environ | {
        "NPROC": "64", "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",  # compiling is all they do
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"} | environment
    if count > 1:
        settings |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": str(count)}
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=settings | ({"JAX_PROCESS_ID": str(index)} if count > 1 else {}))
        for index in range(count)]


def finish(processes, seconds):
    """[(exit status, output)]; whoever is alive then is killed."""
    try:
        return [(process.wait(), output) for process in processes for output in [process.communicate(timeout=seconds)[0]]]
    finally:
        for process in processes:
            process.kill()


def train(peers, **sizes):
    """{name: array}: loss, gradients and weights of supervised steps over rows that each process feeds its part of."""
    import jax
    import numpy as np
    import optax
    from jax.sharding import PartitionSpec, reshard
    from small_model import random_model

    from glm_jax.model import IndexerConfig, MLAConfig, ModelConfig, MoEConfig
    from glm_jax.model.transformer import Transformer
    from glm_jax.parallel import make_mesh, sharding_of
    from glm_jax.parallel.distributed import check_devices, feed, own_rows
    from glm_jax.training.objectives import supervised_loss
    from glm_jax.training.step import build_update, init_state

    config = ModelConfig(
        vocab_size=48, hidden_size=16, layers=1, dense_layers=0, intermediate_size=16, heads=2,
        mla=MLAConfig(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
        indexer=IndexerConfig(heads=2, head_dim=6, topk=6),
        moe=MoEConfig(experts=4, experts_per_token=2, shared_experts=1, intermediate_size=8))
    rng = np.random.default_rng(0)
    rows, length = 8, 24
    tokens = rng.integers(0, 48, (3, 1, rows, length)).astype(np.int32)
    segments = np.where(np.arange(length) < rng.integers(12, length, (3, 1, rows, 1)), 1, 0).astype(np.int32)
    mask = (segments * (rng.random(segments.shape) < 0.7)).astype(np.float32)
    optimizer = optax.sgd(0.05, momentum=0.9)  # whose state after one step is the gradient
    objective = functools.partial(supervised_loss, dense_attention=False, indexer_coefficient=1.0, balance_coefficient=0.01)
    update = build_update(objective, optimizer)
    mesh = make_mesh(**sizes)
    check_devices(mesh, peers)
    result = {}

    def keep(name, tree):
        whole = jax.jit(lambda tree: jax.tree.map(lambda leaf: reshard(leaf, PartitionSpec()), tree))(tree)
        for path, leaf in jax.tree_util.tree_flatten_with_path(whole)[0]:
            result[f"{name}{jax.tree_util.keystr(path)}"] = np.asarray(leaf.addressable_data(0))

    with jax.set_mesh(mesh):
        placed = jax.tree.map(
            lambda declared, w: jax.device_put(np.asarray(w), sharding_of(declared, mesh)), Transformer.declare_tree(config),
            random_model(config))
        state = jax.jit(init_state, static_argnums=1)(placed, optimizer)
        for step in range(3):
            arrays = {"tokens": tokens[step], "segment_ids": segments[step], "loss_mask": mask[step]}
            shared = {
                "loss_tokens": np.float32(mask[step].sum()), "real_tokens": np.float32(segments[step].sum()), "sequences": np.float32(rows)}
            mine = {name: own_rows(array, peers, axis=1) for name, array in arrays.items()}
            state, sums = update(state, feed(mine, mesh), shared, np.int32(1))
            result |= {f"{name} {step}": np.asarray(value) for name, value in jax.device_get(sums).items()}
            if step == 0:
                keep("gradient", state.optimizer[0].trace)
        keep("weight", state.model)
    return result


def main(path):
    import numpy as np

    from glm_jax.parallel import distributed

    peers = distributed.start()
    result = train(peers, data=2, fsdp=2, expert=2)
    if peers.first:
        np.savez(path, **result)
    peers.gather("the end")
    peers.close()


if __name__ == "__main__":
    main(sys.argv[1])
