"""The thread pool from outside: it sleeps when idle, leaves nothing behind, and fails without ending the process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kernel_cases as cases

STATUS = Path("/proc/self/status")
on_linux = pytest.mark.skipif(not STATUS.exists(), reason="counts threads and memory in /proc, which only Linux has")


def status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1])


def test_an_idle_pool_uses_no_cpu(lib):
    weights = cases.random_weights("Q8_0", 16, 32)
    packed = cases.pack(lib, weights)
    handle = lib.hk_pool_new(4)
    cases.linear(lib, handle, "portable", weights, packed, cases.activations(1, 32))
    before = time.process_time()
    time.sleep(0.5)
    used = time.process_time() - before
    lib.hk_pool_free(handle)
    assert used < 0.05


@on_linux
def test_pools_leave_no_thread_and_no_memory(lib):
    weights = cases.random_weights("Q8_0", 16, 32)
    packed = cases.pack(lib, weights)
    x = cases.activations(3, 32)

    def make_and_free(count: int) -> None:
        for i in range(count):
            handle = lib.hk_pool_new(1 + i % 4)
            if i % 3:
                cases.linear(lib, handle, "portable", weights, packed, x)
            lib.hk_pool_free(handle)

    make_and_free(20)
    threads, memory = status("Threads"), status("VmRSS")
    make_and_free(200)
    assert status("Threads") == threads
    assert status("VmRSS") - memory < 4096  # KiB


@on_linux
def test_too_many_threads_are_refused(lib):
    script = """
import resource
from pathlib import Path
import hyflash_kernels

def threads():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Threads:")).split()[1])

lib = hyflash_kernels.library()
before = threads()
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
assert lib.hk_pool_new(5000) is None
assert threads() == before
handle = lib.hk_pool_new(2)
assert handle is not None
assert lib.hk_pool_ping_pong(handle) > 0
lib.hk_pool_free(handle)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_trip_between_two_threads_takes_time(lib, pool):
    assert lib.hk_pool_ping_pong(pool(1)) == 0
    assert lib.hk_pool_ping_pong(pool(2)) > 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only POSIX systems fork")
def test_a_forked_child_has_threads_of_its_own(lib):
    script = """
import os, sys
import hyflash_kernels
import kernel_cases as cases

lib = hyflash_kernels.library()
weights = cases.random_weights("Q8_0", 64, 32)
packed = cases.pack(lib, weights)
x = cases.activations(3, 32)
handle = lib.hk_pool_new(3)
want = cases.linear(lib, handle, "portable", weights, packed, x)
child = os.fork()
if child == 0:
    for _ in range(20):
        assert (cases.linear(lib, handle, "portable", weights, packed, x) == want).all()
    lib.hk_pool_free(handle)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert (cases.linear(lib, handle, "portable", weights, packed, x) == want).all()
other = os.fork()
if other == 0:  # a child that only frees what its parent had
    lib.hk_pool_free(handle)
    os._exit(0)
assert os.waitpid(other, 0)[1] == 0
lib.hk_pool_free(handle)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
