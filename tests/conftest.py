"""Environment of every test, fixed before JAX is imported: CPU, eight simulated devices, compiled programs kept between runs."""

import gc
import os
import pathlib

# XLA sizes its thread pool from NPROC; with fewer threads than simulated devices a collective can wait for itself.
os.environ.setdefault("NPROC", "64")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()

# JAX writes cache entries without a lock, so each xdist worker keeps its own directory (a worker inherits
# the controller's environment: assign, do not default).
_cache = pathlib.Path(__file__).parent.parent / ".cache" / "jax" / os.environ.get("PYTEST_XDIST_WORKER", "main")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_cache)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

MAPPINGS = 40_000  # of the 65,530 that Linux allows a process by default: every compiled program takes some, and without any left it aborts


def pytest_runtest_teardown():
    """Compiled programs are forgotten before they are too many for one process; those that are needed again come from the cache on disk."""
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and sum(1 for _ in maps.open("rb")) > MAPPINGS:
        import jax  # not above: the environment comes first

        jax.clear_caches()
        gc.collect()
