"""How the process uses the CPU's cores and memory for compute."""

from __future__ import annotations

import ctypes

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEEP_BYTES = 1 << 30  # the most that the parameters take on all versions of glibc


def use_threads(count: int | None, executors: int = 1) -> None:
    """Compute with so many threads; None: our share of one per core.

    With more threads than cores, each waits at every barrier for one that does not run. To be
    called by the computing thread.
    """
    if count is None and executors > 1:
        count = max(1, torch.get_num_threads() // executors)
    if count is not None:
        torch.set_num_threads(count)
    if torch.get_num_interop_threads() != 1:  # can be set only once
        torch.set_num_interop_threads(1)


def keep_memory() -> None:
    """Let malloc keep what is freed.

    glibc gives large blocks back to the system at once; each iteration would then fault all
    pages of its activations in again, which takes longer than computing them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library has other habits
        mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)
