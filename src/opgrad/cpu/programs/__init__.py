"""Programs: what turns a problem into kernels in order, a module for each family of operators.

Imports `ops`, the runtime, kernels and below.

The front ends find an operator's function by its name, in the module of its family. The other modules hold what
programs are made of: steps (`program`) and what puts them together (`building`), their working memory (`workspace`),
their parts (`runtime.plan`), the layout of their loops (`layout`), and steps that several families use.
"""
