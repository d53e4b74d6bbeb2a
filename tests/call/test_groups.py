"""Limits of control groups, of both versions and at any depth, on systems that are folders."""

import math
import os

import pytest

from opgrad.base import limits
from opgrad.cpu.runtime import pool, threads

pytestmark = pytest.mark.any_cpu

UNLIMITED = 9223372036854771712  # what version 1 says of memory that has no limit
OTHERS = "21 1 0:20 / / rw,relatime shared:1 - ext4 /dev/root rw\n24 21 0:22 / /proc rw - proc proc rw"
NEW = "30 21 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
OLD_CPU = "31 21 0:27 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
OLD_MEMORY = "32 21 0:28 {top} /sys/fs/cgroup/me\\040mory rw - cgroup cgroup rw,memory"


def system(root, group, mounts, files):
    """A system whose process lies in these groups, with these files below /sys/fs/cgroup."""
    process = root / "proc" / "self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text(group)
    (process / "mountinfo").write_text("\n".join([OTHERS, *mounts]) + "\n")
    for name, text in files.items():
        path = root / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def found(*arguments):
    root = system(*arguments)
    return limits.cpus(root), limits.memory(root)


def test_version_2_takes_the_smallest_on_the_way_up(tmp_path):
    files = {
        "cpu.stat": "usage_usec 1",
        "a/cpu.max": "250000 100000",
        "a/memory.max": "max",
        "a/b/cpu.max": "800000 100000",
        "a/b/memory.max": "5000",
        "a/b/c d/cpu.max": "max 100000",
        "a/b/c d/memory.max": "7000",
        "a/other/cpu.max": "1000 100000",
    }
    assert found(tmp_path, "0::/a/b/c d\n", [NEW.format(top="/")], files) == (2.5, 5000)


def test_free_memory_is_what_is_left_within_the_limit(tmp_path):
    files = {"a/memory.max": "5000000"}
    root = system(tmp_path, "0::/a\n", [NEW.format(top="/")], files)
    assert limits.free_memory(root) is None
    for left, expected in ((4000, 4096000), (9000, 5000000)):
        (root / "proc" / "meminfo").write_text(f"MemTotal:  9999 kB\nMemAvailable:  {left} kB\n")
        assert limits.free_memory(root) == expected


def test_version_1_has_a_hierarchy_for_each_controller(tmp_path):
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/x/cpu.cfs_quota_us": "150000",
        "cpu,cpuacct/x/cpu.cfs_period_us": "50000",
        "cpu,cpuacct/x/y/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/x/y/cpu.cfs_period_us": "50000",
        "me mory/memory.limit_in_bytes": UNLIMITED,
        "me mory/m/memory.limit_in_bytes": 4096,
    }
    group = "4:memory:/m\n3:cpu,cpuacct:/x/y\n1:name=systemd:/elsewhere\n0::/x\n"
    assert found(tmp_path, group, [OLD_CPU.format(top="/"), OLD_MEMORY.format(top="/")], files) == (3.0, 4096)


def test_both_versions_at_once(tmp_path):
    """Memory is version 1's there, CPUs version 2's."""
    files = {"unified/u/cpu.max": "50000 100000", "me mory/memory.limit_in_bytes": 8192}
    mounts = [OLD_MEMORY.format(top="/"), NEW.format(top="/").replace("cgroup rw", "cgroup/unified rw", 1)]
    assert found(tmp_path, "4:memory:/\n0::/u\n", mounts, files) == (0.5, 8192)


@pytest.mark.parametrize(
    ("top", "group"),
    [("/docker/1", "/docker/1"), ("/docker/1", "/docker/1/inner"), ("/", "/../../sibling"), ("/docker/1", "/other")],
    ids=["mounted itself", "below what is mounted", "out of sight", "beside what is mounted"],
)
def test_containers_see_their_own_group_as_the_root(tmp_path, top, group):
    files = {"cpu.max": "400000 100000", "memory.max": "9000", "inner/cpu.max": "100000 100000", "inner/memory.max": 10}
    inner = group.endswith("inner")
    assert found(tmp_path, f"0::{group}\n", [NEW.format(top=top)], files) == ((1.0, 10) if inner else (4.0, 9000))


@pytest.mark.parametrize("text", ["", "max", "max 100000", "100000", "-1 100000", "5 0", "five 5"])
def test_what_is_no_limit(tmp_path, text):
    """Also of a system that has none of these files."""
    files = {"cpu.max": text, "memory.max": text.split(" ")[0].replace("100000", "max").replace("5", "max")}
    assert found(tmp_path / "1", "0::/\n", [NEW.format(top="/")], files) == (math.inf, math.inf)
    assert limits.cpus(tmp_path) == limits.memory(tmp_path) == math.inf


def test_a_file_that_is_no_text(tmp_path):
    root = system(tmp_path, "0::/\n", [NEW.format(top="/")], {"cpu.max": ""})
    (root / "sys/fs/cgroup/cpu.max").write_bytes(b"\xff\xfe")
    assert limits.cpus(root) == math.inf


@pytest.mark.parametrize(("quota", "count"), [(0.5, 1), (1.0, 1), (2.5, 2), (7.99, 7), (math.inf, 8)])
def test_threads_stay_within_the_quota(monkeypatch, quota, count):
    monkeypatch.delenv("OPGRAD_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(limits, "cpus", lambda: quota)
    assert threads.default_threads() == count
    monkeypatch.setenv("OPGRAD_NUM_THREADS", "16")
    assert threads.default_threads() == 16


def test_the_pool_stays_within_the_limit(monkeypatch):
    monkeypatch.setattr(limits, "memory", lambda: 12345)
    assert pool._memory() == 12345
    monkeypatch.setattr(limits, "memory", lambda: math.inf)
    assert pool._memory() > 12345
