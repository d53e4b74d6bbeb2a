"""How many CPUs and how much memory a process may use: the limits of Linux's control groups, in which containers run.

A process lies in a group of each hierarchy that is mounted, and a group in those above it. Any of them may have a
limit, of which the smallest holds. Groups of version 1 have a hierarchy for each controller, those of version 2 one
for all; a system may have both.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
MOST_THREADS = max(64, 4 * (os.cpu_count() or 1))  # of a call; more than four for each CPU only wait


def default_threads() -> int:
    """OPGRAD_NUM_THREADS, else the number of CPUs that this process may use; at most MOST_THREADS.

    That is those it may run on, and no more than the quota of its control groups: a group that has used its time up
    stands still for the rest of the period, so a quota of 2.5 CPUs makes two threads. The variable is not refused for
    being large: it travels between machines, and results do not depend on it.
    """
    wanted = os.environ.get("OPGRAD_NUM_THREADS")
    if wanted is None:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, int(min(available, cpus(), MOST_THREADS)))
    if not wanted.isdecimal() or int(wanted) < 1:
        raise ValueError(f"OPGRAD_NUM_THREADS is {wanted!r}, expected a whole number of at least 1")
    return min(int(wanted), MOST_THREADS)


def cpus(root: Path = ROOT) -> float:
    """How many CPUs' time the groups of this process may use; infinite without a limit.

    root: where the folders proc and sys lie, for tests.
    """
    return min(map(_cpus, _folders("cpu", root)), default=math.inf)


def memory(root: Path = ROOT) -> float:
    """How many bytes of memory the groups of this process may use; infinite without a limit."""
    return min(map(_memory, _folders("memory", root)), default=math.inf)


def free_memory(root: Path = ROOT) -> int | None:
    """How many bytes new values can take: what Linux says is left, at most the limit; None where no system says it."""
    lines = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    left = lines.get("MemAvailable", "").split()
    return int(min(int(left[0]) << 10, memory(root))) if left and left[0].isdecimal() else None


def _cpus(folder: Path) -> float:
    """The CPU time that a group may use in a period; "max" or -1 stands for no limit."""
    old = (_read(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    numbers = (_read(folder / "cpu.max") or " ".join(old)).split()
    limited = len(numbers) == 2 and all(map(str.isdecimal, numbers)) and int(numbers[1])
    return int(numbers[0]) / int(numbers[1]) if limited else math.inf


def _memory(folder: Path) -> float:
    limit = (_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")).strip()
    return int(limit) if limit.isdecimal() else math.inf


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the groups that hold this process, from its own up to the one that is mounted."""
    groups = dict(_groups(root))
    for kind, controllers, top, place in _mounts(root):
        is_unified = kind == "cgroup2"
        group = groups.get("" if is_unified else controller) if is_unified or controller in controllers else None
        if group is None:
            continue
        # A container sees the path of its group on the machine, and mounted may be that very group.
        below = Path(group).relative_to(top) if Path(group).is_relative_to(top) else Path()
        inner = Path() if ".." in below.parts else below
        for each in (inner, *inner.parents):
            yield root / place.lstrip("/") / each


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """The path of the process's group for each controller of version 1, and for "" that of version 2."""
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            yield name, path


def _mounts(root: Path) -> Iterator[tuple[str, list[str], str, str]]:
    """Each hierarchy that is mounted: its kind, its controllers, the group that is mounted, and where."""
    for line in _read(root / "proc" / "self" / "mountinfo").splitlines():
        where, _, what = line.partition(" - ")
        kind, *_, options = what.split() or ["", ""]
        if kind in ("cgroup", "cgroup2"):
            top, place = (_plain(each) for each in where.split()[3:5])
            yield kind, options.split(","), top, place


def _plain(path: str) -> str:
    """A path in which the kernel wrote a space and the like as a backslash and three octal digits."""
    return path.encode().decode("unicode_escape").encode("latin-1").decode() if "\\" in path else path


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
