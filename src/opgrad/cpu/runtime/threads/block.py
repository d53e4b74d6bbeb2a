"""The words of the memory block that the threads of a pool share, by their places."""

# Words of the pool's memory block. Words that several threads write have cache lines of their own.
LOCK = 0  # 1 while some caller owns the pool
TASK, ARGUMENTS, PARTS, SHARES = 8, 9, 10, 11  # the job; SHARES is used in a region of OpenMP alone
ASLEEP = 16  # 1 while the owner sleeps until its workers have left the job
JOB = 24  # generation << 32 | workers that may join << 16 | workers inside; the generation is odd while the job is open
SLEEPERS, STARTED = 32, 33
C_LOCK, C_UNLOCK, C_WAIT, C_WAKE = 40, 41, 42, 43  # addresses of the system's functions
MUTEX, CONDITION = 48, 64
LEFT_MUTEX, LEFT_CONDITION = 80, 96
NEXT, LINE = 112, 8  # the next part of each thread's share, each on a cache line of its own
MOST_SHARES = 64
# Linux: the CPU of the last caller, and the system's functions.
CPU, C_GET_CPU, C_SET_AFFINITY, C_GET_AFFINITY, C_GET_THREAD = 34, 44, 45, 46, 47
# If OpenMP's threads do the parts: how many of them have found no part left, the system's function that lets other
# threads run first, and OpenMP's functions. One runs a parallel region; in it two return a thread's number and how many
# threads there are.
# C_LIMIT, if PyTorch is loaded: the function that returns how many threads PyTorch would use.
FINISHED, C_YIELD, C_SIZE = 17, 18, 19
C_REGION, C_NUMBER, C_LIMIT, WORK_IN_REGION = 36, 37, 38, 39
# THREADS: the system's number of each worker's thread; of OpenMP's threads, by their numbers in the region, and
# negative once they have no part left. Then come sets of CPUs. CALLERS: those that the caller may use, but the one that
# it runs on. NOW: those that a worker has now. MASKS: for each worker those that it may use, and those of them that it
# was given.
THREADS = NEXT + LINE * MOST_SHARES
MASK_WORDS = 16  # 1024 CPUs
CALLERS = THREADS + MOST_SHARES
NOW, MASKS = CALLERS + MASK_WORDS, CALLERS + 2 * MASK_WORDS
TEAMS = MASKS + 2 * MASK_WORDS * MOST_SHARES  # a team for each number of workers: the pool's address, and that number
POOL, WORKERS, TEAM = 0, 1, 2
NO_CPU = -1

GENERATION, MAY_JOIN = 32, 16  # how far these are shifted in JOB
FIELD = 0xFFFF
SPINS = 1500  # how often a worker looks for the next job before it sleeps: for about 50 µs
