"""Counts the bytes of all tensors on the CPU, in every thread: a library loaded before torch that counts its allocator.

torch's profiler counts only the thread that started it, and lanes are threads. So a shim, compiled here with `cc`,
stands before libc's `posix_memalign` and `free`, and counts what torch's allocator (libc10) asks for:

    environment = counting(directory)        LD_PRELOAD for a process
    live(), peak(), begin_peak()             in that process

`check()` holds it against allocations that are known.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <stdlib.h>

#define ROOM (1u << 20)
static uintptr_t known[ROOM];
static uint64_t sizes[ROOM];
static uint64_t live, most;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);
static uintptr_t low, high; /* the calls of libc10 */

static unsigned place(uintptr_t p) { return (unsigned)((p >> 6) * 2654435761u) & (ROOM - 1); }

static int from_torch(void *caller) {
  uintptr_t at = (uintptr_t)caller;
  if (low && at >= low && at <= high) return 1;
  Dl_info info;
  if (!dladdr(caller, &info) || !info.dli_fname || !strstr(info.dli_fname, "libc10.so")) return 0;
  if (!low || at < low) low = at;
  if (at > high) high = at;
  return 1;
}

int posix_memalign(void **out, size_t alignment, size_t size) {
  if (!real_memalign) real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
  int failed = real_memalign(out, alignment, size);
  if (failed || !size || !from_torch(__builtin_return_address(0))) return failed;
  pthread_mutex_lock(&lock);
  unsigned at = place((uintptr_t)*out);
  while (known[at] > 1) at = (at + 1) & (ROOM - 1);
  known[at] = (uintptr_t)*out;
  sizes[at] = size;
  live += size;
  if (live > most) most = live;
  pthread_mutex_unlock(&lock);
  return 0;
}

void free(void *p) {
  if (!real_free) real_free = dlsym(RTLD_NEXT, "free");
  if (p && !((uintptr_t)p & 63) && live) {
    pthread_mutex_lock(&lock);
    for (unsigned at = place((uintptr_t)p); known[at]; at = (at + 1) & (ROOM - 1))
      if (known[at] == (uintptr_t)p) {
        live -= sizes[at];
        known[at] = 1; /* was there: a search goes on */
        break;
      }
    pthread_mutex_unlock(&lock);
  }
  real_free(p);
}

uint64_t tensor_bytes_live(void) { return live; }
uint64_t tensor_bytes_peak(void) { return most; }
void tensor_bytes_begin(void) { pthread_mutex_lock(&lock); most = live; pthread_mutex_unlock(&lock); }
"""


def counting(directory: Path) -> dict[str, str]:
    """Compile the library; return the environment of a process that counts."""
    source, library = directory / "tensor_bytes.c", directory / "tensor_bytes.so"
    source.write_text(_SOURCE)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


def _call(name: str) -> int:
    function = getattr(ctypes.CDLL(None), f"tensor_bytes_{name}")
    function.restype = ctypes.c_uint64
    return int(function())


def live() -> int:
    """Return the bytes of all tensors now."""
    return _call("live")


def peak() -> int:
    """Return the most since `begin_peak`."""
    return _call("peak")


def begin_peak() -> None:
    """Start a new peak."""
    _call("begin")


def check() -> None:
    """Raise if a known case is counted wrongly: two threads, views, what is freed, and memory that is not torch's."""
    import numpy as np
    import torch

    before = live()
    held: list[object] = []
    thread = threading.Thread(target=lambda: held.append(torch.ones(3_000_000, dtype=torch.uint8)))
    thread.start()
    thread.join()
    held += [torch.empty(1_000_000, dtype=torch.uint8), np.ones(5_000_000, np.uint8), bytearray(7_000_000)]
    held.append(held[1][10:].view(-1))  # type: ignore[index]
    assert live() - before == 4_000_000, live() - before
    begin_peak()
    torch.zeros(500_000, dtype=torch.float32)
    assert peak() - before == 6_000_000, peak() - before
    held.clear()
    assert live() == before, live() - before
