"""Sessions of the tests on a real device: those that name no provider have CUDA's. A plugin of pytest for tools/gpu."""

from opgrad.onnxruntime import sessions

options, _ = sessions.InferenceSession.__defaults__
sessions.InferenceSession.__defaults__ = options, (sessions.CUDA,)
