"""How, on CPUs: compiler, runtime, kernels, programs, and the plans made of them. Imports `ops` and below."""
