"""How work is cut into parts for threads, and when results are written past the cache."""

import functools
from pathlib import Path

CACHE_LINE = 64  # bytes
# A part is worth a thread's attention from about 5 µs of work: 128 KiB at 25 GB/s.
PART_BYTES = 1 << 17
# Larger parts than this only make the threads end at different times.
MAX_PART_BYTES = 1 << 20
DEFAULT_CACHE = 32 << 20


@functools.cache
def last_level_cache() -> int:
    """The size of the largest cache in bytes."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes, default=DEFAULT_CACHE)


def streams(size: int) -> bool:
    """Whether a call that touches `size` bytes shall write past the cache; below, that loses."""
    return size > last_level_cache()


def per_part(units: int, unit_bytes: float) -> int:
    """How many units of work (rows, blocks, strips) make a part."""
    total = units * unit_bytes
    wanted = min(max(PART_BYTES, total / 64), MAX_PART_BYTES)
    return max(1, min(units, round(wanted / max(unit_bytes, 1))))


def count(units: int, per: int) -> int:
    """How many parts that makes."""
    return -(-units // per)
