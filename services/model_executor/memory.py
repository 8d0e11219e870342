"""How much memory of the machine is free for us."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes that can be had without swapping: the machine's, or the container's if that is less."""
    machine = 1024 * _entry(meminfo, "MemAvailable:")
    try:
        limit = int((cgroup / "memory.max").read_text())
    except (OSError, ValueError):  # no container, or one with "max", no limit
        return machine
    used = int((cgroup / "memory.current").read_text())
    idle_files = _entry(cgroup / "memory.stat", "inactive_file")
    return max(0, min(machine, limit - used + idle_files))


def _entry(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        words = line.split()
        if words[0] == name:
            return int(words[1])
    raise ValueError(f"{file} has no {name}")
