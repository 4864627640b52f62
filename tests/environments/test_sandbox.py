"""Hostile and unlucky programs, and workers that die."""

import asyncio
import os
import pathlib
import signal
import threading
import time

import pytest

from glm_jax.environments import EnvironmentFailure, make
from glm_jax.environments.sandbox import MAX_PROGRAM, PythonSandbox

SQUARE = "def f(x): return x * x"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="programs run as nobody only under root")


@pytest.fixture(scope="module")
def sandbox():
    with PythonSandbox() as sandbox:
        yield sandbox


@pytest.fixture(autouse=True)
def works_afterwards(request):
    yield
    if "sandbox" in request.fixturenames:
        assert request.getfixturevalue("sandbox").run(SQUARE, "f", [3]).outputs == [9]


def marked_processes(mark: str) -> list[int]:
    """Processes whose command line holds the mark."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def parents() -> dict[int, tuple[int, str]]:
    """pid -> (parent's pid, state) of every process."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it ended meanwhile
        found[int(path.parent.name)] = int(parent), state
    return found


def descendants(pid: int) -> list[int]:
    children = [child for child, (parent, _) in parents().items() if parent == pid]
    return children + [further for child in children for further in descendants(child)]


def running(pids: list[int]) -> list[int]:
    """Those that still run; a zombie has ended."""
    now = parents()
    return [pid for pid in pids if pid in now and now[pid][1] != "Z"]


def test_values(sandbox):
    inputs = [1, -(10**30), 2.5, "é\n", None, True, [1, {"a": []}]]
    result = sandbox.run("def f(x): return x", "f", inputs)
    assert (result.kind, result.outputs) == ("ok", inputs)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("def f(x) return x", "SyntaxError"),
        ("", "KeyError"),
        ("f = 3", "TypeError"),
        ("def f(): return 1", "TypeError"),
        ("def f(x): return {1, 2}", "TypeError"),
        ("def f(x): return 'a' * 10**6", "too long"),
        ("def f(x): return f(x)", "RecursionError"),
        ("def f(x): raise SystemExit(0)", "SystemExit"),
        ("\0", "null bytes"),
        ("\ud800", "UnicodeEncodeError"),
        ("(" * 5000, ""),
        ("#" * (MAX_PROGRAM + 1), "characters"),
        ("def f(x): return [0] * 10**10", "MemoryError"),
        ("def f(x):\n a = []\n while True: a.append(bytearray(10**7))", "MemoryError"),
        ("import os\nos.fork()", "BlockingIOError"),
        ("import _thread\n_thread.start_new_thread(print, ())", "RuntimeError"),
        ("import os\nos._exit(0)", "without a result"),
        ("import ctypes\nctypes.string_at(0)", "without a result"),
        ("import os\ndef f(x):\n os.write(3, b'{\"kind\": \"ok\", \"outputs\": [9]}\\n')\n return 1", "without a result"),
        ("import os\nos.write(3, b'x' * 10**6)", "without a result"),
        ("import os\nos.closerange(0, 100)", "without a result"),
        ("open('a', 'wb').write(bytes(10**8))", "OSError"),
    ],
)
def test_errors_are_the_programs(sandbox, program, message):
    result = sandbox.run(program, "f", [3], deadline=5.0)
    assert result.kind == "error" and result.outputs == []
    assert message in result.message


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "def f(x):\n while True:\n  try:\n   while True: pass\n  except BaseException: pass",
        "import time\ntime.sleep(60)",
        "import os, time\nos.close(3)\ntime.sleep(60)",
        "import signal\nfor s in range(1, 32):\n if s not in (9, 19): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "import os, signal\nos.kill(0, signal.SIGSTOP)\nimport time\ntime.sleep(60)",
    ],
)
def test_deadline(sandbox, program):
    start = time.perf_counter()
    result = sandbox.run(program, "f", [3], deadline=0.2)
    assert result.kind in ("timeout", "error") and time.perf_counter() - start < 2.0
    assert result.kind == "timeout" or "os.close(3)" in program


def test_prints_are_discarded(sandbox, capfd):
    program = "import sys\ndef f(x):\n for _ in range(20000): print('spam' * 20); print(1, file=sys.stderr)\n return x"
    result = sandbox.run(program, "f", [3], 5.0)
    assert (result.kind, result.outputs) == ("ok", [3])
    assert capfd.readouterr() == ("", "")


def test_programs_share_nothing(sandbox):
    program = "import json, os\njson.leak = 1\nopen('leak', 'w').close()\ndef f(x): return os.listdir()"
    assert sandbox.run(program, "f", [0]).outputs == [["leak"]]
    result = sandbox.run("import json, os\ndef f(x): return [hasattr(json, 'leak'), os.listdir(), sorted(os.environ)]", "f", [0])
    assert result.outputs[0][:2] == [False, []] and set(result.outputs[0][2]) <= {"PATH", "TMPDIR", "LD_LIBRARY_PATH", "LC_CTYPE"}
    directory = sandbox.run("import os, shutil\ndef f(x):\n d = os.getcwd()\n shutil.rmtree(d, True)\n return d", "f", [0]).outputs[0]
    assert not os.path.exists(directory)


@needs_root
def test_privileges(sandbox):
    program = (
        "import os\ndef f(path):\n"
        " open_fds = [fd for fd in range(64) if os.path.exists(f'/proc/self/fd/{fd}')]\n"
        " try: open(path, 'w')\n except PermissionError: return [os.getuid(), os.getgid(), os.getgroups(), open_fds]"
    )
    assert sandbox.run(program, "f", ["/etc/passwd"]).outputs == [[65534, 65534, [], [0, 1, 2, 3]]]


@needs_root
def test_no_network(sandbox):
    interfaces = sandbox.run("def f(path): return [line.split(':')[0].strip() for line in open(path)][2:]", "f", ["/proc/self/net/dev"])
    assert interfaces.outputs == [["lo"]]


@needs_root
def test_a_program_cannot_kill_another(sandbox):
    with PythonSandbox() as other:
        results = []
        program = "import time\ndef f(x): time.sleep(0.5); return x"
        victim = threading.Thread(target=lambda: results.append(other.run(program, "f", [1], 5.0)))
        victim.start()
        time.sleep(0.2)
        sandbox.run("import os\ndef f(x): os.kill(-1, 9)", "f", [1])
        victim.join()
    assert results[0].outputs == [1]


@pytest.mark.parametrize("ending", ["def f(x): return x", "import os\nos._exit(0)", "while True: pass"])
def test_daemons_die(ending):
    mark = f"daemon-{os.getpid()}-{len(ending)}"
    program = f"""
import os, signal, subprocess, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.execv("/bin/sh", ["sh", "-c", "sleep 300; : {mark}"])
    os._exit(0)
time.sleep(0.1)
{ending}
"""
    with PythonSandbox(processes=64) as sandbox:
        sandbox.run(program, "f", [1], 0.5)
        assert not marked_processes(mark)


def test_dead_worker_is_an_environment_failure_once():
    with PythonSandbox() as sandbox:
        environment = make("glm_jax/CodeSteps-v0", sandbox=sandbox)
        for _ in range(2):
            os.kill(sandbox._workers[0].process.pid, signal.SIGKILL)
            environment.reset(seed=0)
            with pytest.raises(EnvironmentFailure):
                environment.step("def f(x): return x")
            environment.reset(seed=0)
            assert environment.step("def f(x): return x")[4] == {"status": "COMPLETED"}


def test_worker_killed_in_the_middle():
    with PythonSandbox() as sandbox:
        sandbox.run(SQUARE, "f", [4])
        worker = sandbox._workers[0]
        directory = pathlib.Path(worker.directory)
        program = []

        def kill():
            program.extend(descendants(worker.process.pid))
            os.kill(worker.process.pid, signal.SIGKILL)

        threading.Timer(0.5, kill).start()
        with pytest.raises(EnvironmentFailure):
            sandbox.run("while True: pass", "f", [1], 30.0)
        assert sandbox.run(SQUARE, "f", [4]).outputs == [16]
        assert not directory.exists()
        until = time.monotonic() + 5
        while running(program) and time.monotonic() < until:
            time.sleep(0.01)
        assert program and not running(program)  # the program died with its worker


def test_several_loops_share_it(sandbox):
    async def squares(start):
        results = await asyncio.gather(*[sandbox.run_async(SQUARE, "f", [start + i]) for i in range(10)])
        return [result.outputs for result in results]

    found = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: asyncio.run(squares(i))})) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {start: [[(start + i) ** 2] for i in range(10)] for start in range(3)}


def test_loop_is_not_blocked(sandbox):
    async def ticks():
        count, task = 0, asyncio.create_task(sandbox.run_async("while True: pass", "f", [1], 0.3))
        while not task.done():
            await asyncio.sleep(0.01)
            count += 1
        return count, task.result().kind

    count, kind = asyncio.run(ticks())
    assert count > 5 and kind == "timeout"


def test_close():
    sandbox = PythonSandbox(workers=2)
    processes = [worker.process for worker in sandbox._workers]
    sandbox.close()
    sandbox.close()
    assert all(process.returncode is not None for process in processes)
    with pytest.raises(EnvironmentFailure, match="closed"):
        sandbox.run(SQUARE, "f", [1])
    with pytest.raises(EnvironmentFailure, match="closed"):
        asyncio.run(sandbox.run_async(SQUARE, "f", [1]))


def test_a_program_costs_milliseconds(sandbox):
    start = time.perf_counter()
    for _ in range(50):
        sandbox.run(SQUARE, "f", [1] * 8)
    assert (time.perf_counter() - start) / 50 < 0.05
