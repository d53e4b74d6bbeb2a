"""Cuts work into parts for threads, and decides when results are written past the cache."""

import functools
from pathlib import Path

# The least bytes of a part: handing it to a thread pays from about 5 µs of work, which is 128 KiB at 25 GB/s.
PART_BYTES = 1 << 17
# The most bytes of a part: with larger ones, threads only end at more different times.
MAX_PART_BYTES = 1 << 20
DEFAULT_CACHE = 32 << 20


@functools.cache
def caches() -> dict[str, int]:
    """Bytes of the first core's data caches by level, "L1" first; empty where the system does not say."""
    sizes = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction" and size.endswith("K") and size[:-1].isdecimal():
            sizes[f"L{level}"] = int(size[:-1]) << 10
    return sizes


def last_level_cache() -> int:
    """The size of the largest cache in bytes."""
    return max(caches().values(), default=DEFAULT_CACHE)


def streams(size: int) -> bool:
    """Whether a call that touches `size` bytes writes past the cache. If all fits the cache, that would be slower."""
    return size > last_level_cache()


def per_part(units: int, unit_bytes: float) -> int:
    """How many units of work (rows, blocks, strips) make a part."""
    total = units * unit_bytes
    wanted = min(max(PART_BYTES, total / 64), MAX_PART_BYTES)
    return max(1, min(units, round(wanted / max(unit_bytes, 1))))


def count(units: int, per: int) -> int:
    """How many parts, each of `per` units, so many units make."""
    return -(-units // per)


def round_up(n: int, multiple: int) -> int:
    return count(n, multiple) * multiple
