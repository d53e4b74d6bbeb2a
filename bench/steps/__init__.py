"""Training steps beside onnxruntime-training 1.19.2 and PyTorch: `python -m bench.steps` from the root of the source.

__main__.py  the command          run.py       what is measured, in turns    tables.py   tables and the picture
process.py   steps in a process of their own, of which api_step.py is the script; that of the old runtime has no opgrad
exported.py  artifact sets and graphs of models in PyTorch, which models.py has
generated.py graphs with gradients as opgrad generates them                  liveness.py the bytes alive in a graph
"""
