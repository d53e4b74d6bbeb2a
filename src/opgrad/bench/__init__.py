"""The benchmark: opgrad beside torch, onnxruntime, SciPy and NumPy, in one process, turn by turn.

cells.py    what is measured        peers.py    who else computes it     copying.py  how fast memory is
measure.py  how time is taken, in the two ways in which users work       memories.py  whose memory arrays lie in
run.py      all cells, into JSON    tables.py, plots.py, page.py  from that JSON
cpu_target.py  one cell on the CPU   other devices: cuda/, jax_target.py
step_case.py  losses and attention in PyTorch, whose memory is measured, too
instruction_sets.py  processes in which everybody is held to a lower one  sweep.py  shapes of every kind
"""
