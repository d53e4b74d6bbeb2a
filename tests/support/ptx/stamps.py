"""Who touched what of global memory in a launch: each access leaves its stamp, a word at a time.

Blocks run in any order, so what one of them writes no other may read or write in the same launch. Within a block a
barrier must stand between a write and what another thread reads or writes there. That a thread writes what another has
read is not looked for: Triton has several threads read the same element, of which one computes with it and writes.
"""

import numpy as np

NOBODY = -1


class Stamps:
    """The stamps on one allocation. granule: the bytes of a word, no more than those of the narrowest access."""

    def __init__(self, allocation, granule):
        size = -(-allocation.size // granule)
        self.address, self.granule = allocation.address, granule
        self.block = np.full(size, NOBODY, np.int32)  # that touched it first
        self.by_several, self.is_written = np.zeros(size, bool), np.zeros(size, bool)
        # Of the last write: the thread in its block, and the barriers that its block and its warp had passed.
        self.writer = [np.full(size, NOBODY, np.int32) for _ in range(3)]

    def words(self, addresses, width, lanes):
        """The words of accesses, and the lane of each."""
        first = (addresses - np.uint64(self.address)).astype(np.int64) // self.granule
        count = max(width // self.granule, 1)
        return (first[:, None] + np.arange(count)).ravel(), np.repeat(lanes, count)

    def touch(self, machine, at, lanes, writes):
        """Stamp the words; which of these accesses race with one of another block, and of another thread."""
        blocks = machine.blocks[machine.cta[lanes]]
        fresh = self.block[at] == NOBODY
        self.block[at[fresh]] = blocks[fresh]
        self.by_several[at[self.block[at] != blocks]] = True
        self.is_written[at] |= writes
        between_blocks = self.by_several[at] & self.is_written[at]
        now = machine.tid[lanes], machine.cta_epoch[machine.cta[lanes]], machine.warp_epoch[lanes // machine.warp]
        thread, block_epoch, warp_epoch = (each[at] for each in self.writer)
        same_warp = thread // machine.warp == now[0] // machine.warp
        unordered = (block_epoch == now[1]) & ~(same_warp & (warp_epoch < now[2]))
        between_threads = (thread != NOBODY) & (thread != now[0]) & unordered & ~between_blocks
        if writes:
            for kept, new in zip(self.writer, now, strict=True):
                kept[at] = new
        return between_blocks, between_threads
