"""Loop and Scan for the reference evaluator, whose own ones join rows of two axes and know one direction alone."""

import numpy as np
from onnx.reference.op_run import OpRun


class Repeated(OpRun):
    """An operator with a body; `_turn` gives the results of one run of it."""

    def need_context(self):
        """Bodies read values from outside."""
        return True

    def _turn(self, context, values):
        """The results of the body for its inputs, in their order."""
        return list(self.body.run(None, {**(context or {}), **dict(zip(self.body.input_names, values, strict=True))}))


class Loop(Repeated):
    """A loop, whose rows are stacked along a new axis."""

    def _run(self, most, go_on, *states, context=None, **_):
        states, turn = list(states), 0
        rows = [[] for _ in self.body.output_names[1 + len(states) :]]
        while (go_on is None or np.all(go_on)) and (most is None or turn < most):
            given = self._turn(context, [np.array(turn), np.array(True), *states])
            go_on, states = given[0], given[1 : 1 + len(states)]
            for row, value in zip(rows, given[1 + len(states) :], strict=True):
                row.append(value)
            turn += 1
        return (*states, *(np.stack(row) if row else np.zeros((0,)) for row in rows))


class Scan(Repeated):
    """A scan in either direction, along any axis."""

    def _run(self, *args, context=None, **_):
        count = len(args) - self.num_scan_inputs
        states, sequences = list(args[:count]), list(args[count:])
        forward = [
            np.moveaxis(each, axis, 0)[:: -1 if back else 1]
            for each, axis, back in zip(sequences, *self._ways("input", len(sequences)), strict=True)
        ]
        rows = [[] for _ in self.body.output_names[count:]]
        for elements in zip(*forward, strict=True):
            given = self._turn(context, [*states, *elements])
            states = given[:count]
            for row, value in zip(rows, given[count:], strict=True):
                row.append(value)
        ways = zip(rows, *self._ways("output", len(rows)), strict=True)
        return (*states, *(np.moveaxis(np.stack(row[:: -1 if back else 1]), 0, axis) for row, axis, back in ways))

    def _ways(self, of, count):
        return (getattr(self, f"scan_{of}_{what}", None) or [0] * count for what in ("axes", "directions"))
