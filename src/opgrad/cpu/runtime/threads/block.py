"""The memory that the threads of a pool share. Words that several threads write have cache lines of their own."""

import ctypes

from opgrad.base.limits import MOST_THREADS
from opgrad.cpu.compiler.structures import Structure, at, structure
from opgrad.cpu.compiler.words import CACHE_LINE

MOST_SHARES = 64
MASK_WORDS = 16  # of a set of CPUs: 1024 CPUs
MASK = 8 * MASK_WORDS  # bytes
NO_CPU = -1
GENERATION, MAY_JOIN = 32, 16  # how far these are shifted in the word `Block.job`
FIELD = 0xFFFF
SPINS = 1500  # how often a worker looks for the next job before it sleeps: for about 50 µs


@structure
class Block(Structure):
    """A pool: where its words lie, and the system's functions. Only c_limit is ever changed once threads run."""

    lock: int  # 1 while some caller owns the pool
    # generation << 32 | workers that may join << 16 | workers inside; the generation is odd while the job is open
    job: int
    current: int  # the `Work` of the job
    next: int  # the next part of each thread's share, one on each cache line
    asleep: int  # 1 while the owner sleeps until its workers have left the job
    sleepers: int
    started: int
    finished: int  # how many of OpenMP's threads have found no part left
    cpu: int  # that of the last caller
    mutex: int
    condition: int
    left_mutex: int
    left_condition: int
    # The system's number of each worker's thread; of OpenMP's threads, by their numbers in the region, and negative
    # once they have no part left.
    threads: int
    callers: int  # the CPUs that the caller may use, but the one that it runs on
    now: int  # those that a worker has now
    masks: int  # for each worker the CPUs that it may use, and those of them that it was given
    teams: int  # a `Team` for each number of workers
    c_lock: int
    c_unlock: int
    c_wait: int
    c_wake: int
    c_set_affinity: int  # Linux
    c_get_affinity: int
    c_get_thread: int
    c_get_cpu: int
    # If OpenMP's threads do the parts: what runs a parallel region, what returns in it a thread's number and how many
    # threads there are, the system's function that lets other threads run first, and what each thread runs.
    c_region: int
    c_number: int
    c_size: int
    c_yield: int
    c_work: int
    c_limit: int  # if PyTorch is loaded: the function that returns how many threads PyTorch would use


@structure
class Work(Structure):
    """A task, the address of its arguments, and the number of its parts."""

    task: int
    arguments: int
    parts: int
    shares: int  # in a region of OpenMP alone


@structure
class Team(Structure):
    """How many workers of a pool may help a call."""

    pool: int
    workers: int


WORDS = "lock", "job", "asleep", "sleepers", "started", "finished", "cpu"
WAITING = "mutex", "condition", "left_mutex", "left_condition"
BYTES = {
    **dict.fromkeys(WORDS, 8),
    **dict.fromkeys(WAITING, 128),
    "current": ctypes.sizeof(Work),
    "next": CACHE_LINE * MOST_SHARES,
    "threads": 8 * MOST_SHARES,
    "callers": MASK,
    "now": MASK,
    "masks": 2 * MASK * MOST_SHARES,
    "teams": ctypes.sizeof(Team) * MOST_THREADS,
}


def new_block() -> Block:
    """The memory of a new pool, all zero. It is never freed: workers outlive the interpreter's objects."""
    lines = {name: -(-size // CACHE_LINE) for name, size in {"": ctypes.sizeof(Block), **BYTES}.items()}
    memory = ctypes.create_string_buffer(CACHE_LINE * (sum(lines.values()) + 1))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    start = -(-ctypes.addressof(memory) // CACHE_LINE) * CACHE_LINE
    block, following = at(Block, start), start + CACHE_LINE * lines[""]
    for name in BYTES:
        setattr(block, name, following)
        following += CACHE_LINE * lines[name]
    return block
