"""Open files: as many as the system allows, and how many connections that makes."""

from __future__ import annotations

import resource

RESERVED = 160  # for the mesh, the log, certificates and threads
EXCESS = 64  # connections that are only told that there is no room for them
FEWEST = 16


def raise_limit() -> int:
    """Let this process open as many files as it may at all; returns how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def room(wanted: int, limit: int) -> int:
    """Connections to serve at once, where so many are wanted and so many files may be open."""
    if limit == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(limit - RESERVED - EXCESS, FEWEST))
