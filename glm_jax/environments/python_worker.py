"""The worker of the Python sandbox: a warm interpreter that forks one confined child per program. Standard library only.

Run by `sandbox.py` as `python -I -S python_worker.py`. Requests and responses are JSON, one a line, on the standard input and output:
{"program", "function", "inputs", "deadline", "memory", "processes"} -> {"kind", "outputs", "message"}, kind ok | error | timeout | failure.
"failure" is the sandbox's own; the others are the program's doing.

A child reports on a pipe of its own: "ready" once it is confined and before the program runs, then the nonce and the result. Whatever a
program prints is discarded, and whatever it writes to the pipe without the nonce is an error of its own. A program that inspects
the interpreter's frames can find the nonce, but gains nothing: the result holds its own outputs, and what they should be is not known here.
"""

# Programs import these too; loaded before the fork, because the unprivileged child may not be allowed to read the installation.
import bisect  # noqa: F401
import collections  # noqa: F401
import copy  # noqa: F401
import ctypes
import dataclasses  # noqa: F401
import datetime  # noqa: F401
import decimal  # noqa: F401
import enum  # noqa: F401
import fractions  # noqa: F401
import functools  # noqa: F401
import gc
import heapq  # noqa: F401
import itertools  # noqa: F401
import json
import math
import operator  # noqa: F401
import os
import random  # noqa: F401
import re  # noqa: F401
import resource
import secrets
import select
import shutil
import signal
import statistics  # noqa: F401
import string  # noqa: F401
import sys
import tempfile
import textwrap  # noqa: F401
import time
import typing  # noqa: F401

NOBODY = 65534
RESULT_FD = 3
MAX_RESULT = 64 * 1024  # bytes
START_PATIENCE = 10.0  # seconds a forked child may take to be confined, on a busy machine
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x20000000, 0x40000000
LIBC = ctypes.CDLL(None)


def confine(directory: str, deadline: float, memory: int, processes: int) -> None:
    """Takes from this process what a program must not have: file descriptors, memory, time, processes and privileges."""
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(RESULT_FD + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.chdir(directory)
    seconds = math.ceil(deadline) + 1  # a backstop: the worker's wall clock comes first
    limits = {"CPU": seconds, "AS": memory, "NPROC": processes, "FSIZE": 1 << 20, "NOFILE": 16, "CORE": 0}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after the change of user, which clears it


def execute(program: str, function: str, inputs: list) -> dict:
    """Runs the program and calls its function on each input; anything it raises, SystemExit included, is its error."""
    namespace = {"__name__": "__program__"}
    try:
        exec(compile(program, "<program>", "exec"), namespace)
        outputs = [namespace[function](x) for x in inputs]
        result = {"kind": "ok", "outputs": outputs, "message": ""}
        if len(json.dumps(result)) > MAX_RESULT // 2:
            raise ValueError("the outputs are too long")
        return result
    except BaseException as error:  # SystemExit and the like are the program's errors too
        return {"kind": "error", "outputs": [], "message": f"{type(error).__name__}: {error}"[:200]}


def child(request: dict, nonce: str, writer: int, directory: str) -> None:
    """Life of the forked process; ends it."""
    try:
        if writer != RESULT_FD:
            os.dup2(writer, RESULT_FD)
        try:
            confine(directory, request["deadline"], request["memory"], request["processes"])
        except Exception as error:
            os.write(RESULT_FD, f"not confined: {type(error).__name__}: {error}".replace("\n", " ").encode() + b"\n")
            os._exit(1)
        os.write(RESULT_FD, b"ready\n")
        result = execute(request["program"], request["function"], request["inputs"])
        data = f"{nonce} {json.dumps(result)}\n".encode()
        while data:
            data = data[os.write(RESULT_FD, data) :]
    finally:
        os._exit(0)


def read_line(reader: int, buffer: bytearray, seconds: float) -> bytes | None:
    """Next line of the pipe, without its end; b"" when the pipe ended or the line is too long, None when the time is over."""
    until = time.monotonic() + seconds
    while b"\n" not in buffer:
        left = until - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            return None
        data = os.read(reader, 65536)
        buffer += data
        if not data or len(buffer) > MAX_RESULT:
            return b""
    line, _, rest = bytes(buffer).partition(b"\n")
    buffer[:] = rest
    return line


def bury(pid: int) -> None:
    """Kills the child, its process group and every descendant that left the group (this process is their reaper), and waits for them."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # its group does not exist yet
    os.waitpid(pid, 0)
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        with open(f"/proc/self/task/{os.getpid()}/children") as children:
            for orphan in children.read().split():
                os.kill(int(orphan), signal.SIGKILL)
        time.sleep(0.001)
    raise RuntimeError("descendants of a program could not be killed")


def run(request: dict, own_processes: int) -> dict:
    """Runs one program in a child and returns its result. own_processes: descriptor of this process's own process namespace."""
    nonce = secrets.token_hex(16)
    directory = tempfile.mkdtemp(prefix="program-")
    if os.geteuid() == 0:
        os.chown(directory, NOBODY, NOBODY)
    reader, writer = os.pipe()
    # Where the platform lets us, the child is the first process of a namespace of its own: it can signal no other program, and whatever it
    # leaves behind dies with it. Only from its own namespace may a process ask for a further one.
    LIBC.setns(own_processes, CLONE_NEWPID)
    LIBC.unshare(CLONE_NEWPID)
    try:
        pid = os.fork()
        if pid == 0:
            child(request, nonce, writer, directory)
        os.close(writer)
        try:
            buffer = bytearray()
            ready = read_line(reader, buffer, START_PATIENCE)
            if ready != b"ready":
                raise RuntimeError(f"a child did not start: {ready!r}")
            line = read_line(reader, buffer, request["deadline"])
        finally:
            bury(pid)
    finally:
        os.close(reader)
        shutil.rmtree(directory, ignore_errors=True)
    if line is None:
        return {"kind": "timeout", "outputs": [], "message": f"ran past its deadline of {request['deadline']} s"}
    sender, _, body = line.partition(b" ")
    if sender != nonce.encode():
        return {"kind": "error", "outputs": [], "message": "ended without a result"}
    try:
        result = json.loads(body)
    except (ValueError, RecursionError) as error:
        return {"kind": "error", "outputs": [], "message": f"unreadable result: {error}"[:200]}
    # A program that found the nonce may send anything: it must not pass for a failure of the sandbox, which would spare it its reward of 0.
    match result:
        case {"kind": "ok" | "error" as kind, "outputs": list(outputs), "message": str(message)}:
            return {"kind": kind, "outputs": outputs, "message": message}
    return {"kind": "error", "outputs": [], "message": "not a result"}


def main() -> None:
    """Serves requests until the standard input ends."""
    requests, responses = os.fdopen(0, "rb", closefd=False), 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))  # all that a child has to close
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    LIBC.unshare(CLONE_NEWNET | CLONE_NEWIPC)  # no network for programs, where the platform lets us
    own_processes = os.open("/proc/self/ns/pid", os.O_RDONLY)
    gc.freeze()
    for line in requests:
        try:
            response = run(json.loads(line), own_processes)
        except Exception as error:
            response = {"kind": "failure", "outputs": [], "message": f"{type(error).__name__}: {error}"}
        data = json.dumps(response).encode() + b"\n"
        while data:
            data = data[os.write(responses, data) :]


if __name__ == "__main__":
    sys.exit(main())
