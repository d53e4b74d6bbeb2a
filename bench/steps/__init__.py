"""Training steps beside onnxruntime-training 1.19.2 and PyTorch: `python -m bench.steps` from the root of the source.

__main__.py  the command          run.py     what is measured, in turns     tables.py  tables and the picture
api_step.py  the script of a process with steps, in which the old runtime has no opgrad
generated.py graphs with gradients as opgrad generates them                 models.py  models in PyTorch
"""
