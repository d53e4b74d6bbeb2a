"""The benchmark: opgrad beside torch, onnxruntime, SciPy and NumPy, in one process, turn by turn.

cells.py    what is measured        peers.py    who else computes it     copying.py  how fast memory is
measure.py  how time is taken       run.py      all cells, into JSON     tables.py, plot.py  from that JSON
ways.py     results in new memory, or in memory that is given      memories.py  whose memory arrays lie in
targets.py  one cell on the CPU, and which other devices there are: cuda/
"""
