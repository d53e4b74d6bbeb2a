"""Recurrent layers and their gradients.

The gates are sums of a product with x and a product with the states. The products with x of all steps are one product
of matrices, and so is each gradient of the weights. The products with the states go from step to step, in a kernel
whose units are sequences (`lstm`, `gru`).
"""

from collections.abc import Mapping
from typing import Any

from opgrad.contract.problem import Problem
from opgrad.cpu.kernels.recurrent import gru, lstm
from opgrad.cpu.kernels.recurrent.products import LayerMatrix, Panels
from opgrad.cpu.programs.program import Program
from opgrad.cpu.programs.recurrent.program import Building

LSTM, GRU = 4, 3  # gates


def _gates_from_x(building: Building) -> None:
    """Write the gates' products with x into the result that holds the gates later."""
    weights = building.transposed("w", building.inputs, building.rows)
    gates = building.states_of_steps("gates", building.gates)
    building.multiply_rows(gates, building.inputs_of_steps("x"), weights, building.inputs, building.rows)


def lstm_training(problem: Problem) -> Program:
    b = Building(problem, LSTM)
    _gates_from_x(b)
    b.add_sequences(
        lstm.lstm_steps,
        weights=lstm.CellWeights(b.transposed("r", b.hidden, b.rows), *b.peepholes()),
        bias=b.biases(b.rows),
        start=lstm.Start(b.states("initial_h"), b.states("initial_c")),
        **{name: problem[name] for name in ("gates", "y", "cells", "y_h", "y_c")},
    )
    return b.program("lstm_training")


def lstm_grad(problem: Problem) -> Program:
    b = Building(problem, LSTM)
    dz, state = b.matrix(b.rows), b.directions * b.batch * b.hidden
    c0, cells = b.states("initial_c"), problem["cells"]
    b.add_sequences(
        lstm.lstm_steps_back,
        weights=lstm.CellWeights(b.packed_weights("r", b.hidden), *b.peepholes()),
        c0=c0,
        gates=problem["gates"],
        cells=cells,
        above=lstm.Above(b.of_steps("dy"), b.states("dy_h"), b.states("dy_c")),
        dz=dz.data,
        dh=b.result("dinitial_h", state),
        dc=b.result("dinitial_c", state),
    )
    parts = b.parts(dz, [b.rows])
    b.gradient_of_x(dz)
    b.gradient_of_w(parts)
    b.gradient_of_r(parts, [b.packed_before])
    b.sum_columns(dz, 0, b.rows)
    if b.given("dpeepholes"):
        strips = -(-b.hidden // b.lanes)
        arguments = {"strips": strips, "layer": b.layer, "cells": cells, "c0": c0, "dz": dz.data}
        arguments["dp"] = problem["dpeepholes"]
        b.add(lstm.peepholes_back, b.directions * strips, 5 * b.all_rows * b.lanes * b.item, arguments)
    return b.program("lstm_grad")


def _transposed_new(b: Building) -> Panels:
    """The packed matrix by which the steps multiply the states for n."""
    return b.transposed("r", b.hidden, b.hidden, first=2 * b.hidden)


def gru_training(problem: Problem) -> Program:
    b = Building(problem, GRU)
    linear = problem.attributes["linear_before_reset"]
    _gates_from_x(b)
    b.add_sequences(
        gru.gru_steps_linear if linear else gru.gru_steps,
        r=gru.GateWeights(b.transposed("r", b.hidden, 2 * b.hidden), _transposed_new(b)),
        bias=b.biases(2 * b.hidden, b.hidden) if linear else b.biases(b.rows),
        h0=b.states("initial_h"),
        product=b.shared(b.directions * b.batch * b.hidden),
        **{name: problem[name] for name in ("gates", "y", "y_h")},
    )
    return b.program("gru_training")


def gru_grad(problem: Problem) -> Program:
    b = Building(problem, GRU)
    dz = b.matrix(b.rows)
    common = {
        "kept": gru.Kept(problem["gates"], problem["y"], b.states("initial_h")),
        "above": gru.Above(b.of_steps("dy"), b.states("dy_h")),
        "dh": b.result("dinitial_h", b.directions * b.batch * b.hidden),
    }
    back = _linear_back if problem.attributes["linear_before_reset"] else _reset_back
    dz_h = back(b, dz, common)
    b.gradient_of_x(dz)
    b.sum_columns(dz, 0, 0)
    b.sum_columns(dz_h, b.rows, 0)
    return b.program("gru_grad")


def _reset_back(b: Building, dz: LayerMatrix, common: Mapping[str, Any]) -> LayerMatrix:
    """The steps back, dw and dr. Returns dz: the gradients of the gates' products with the states are the same."""
    resets = b.matrix(b.hidden)
    b.add_sequences(
        gru.gru_steps_back,
        r=gru.GateWeights(
            b.packed_weights("r", b.hidden, 2 * b.hidden),
            b.packed_weights("r", b.hidden, b.hidden, first=2 * b.hidden),
        ),
        dz=dz.data,
        product=resets.data,
        **common,
    )
    parts = b.parts(dz, [2 * b.hidden, b.hidden])
    b.gradient_of_w(parts)
    # The state that is multiplied by the weights of n is the one after the reset gate.
    b.gradient_of_r(parts, [b.packed_before, lambda: b.packed(resets, b.steps, b.batch, b.hidden)])
    return dz


def _linear_back(b: Building, dz: LayerMatrix, common: Mapping[str, Any]) -> LayerMatrix:
    """`_reset_back` for linear_before_reset: the reset gate multiplies the product for n, so its gradient differs."""
    dz_h = b.matrix(b.rows)
    b.add_sequences(
        gru.gru_steps_linear_back,
        r=gru.GateWeights(b.packed_weights("r", b.hidden), _transposed_new(b)),
        bias=b.biases(2 * b.hidden, b.hidden),
        dz=gru.GateGradients(dz.data, dz_h.data),
        product=b.shared(b.directions * b.batch * b.hidden),
        **common,
    )
    b.gradient_of_w(b.parts(dz, [b.rows]))
    b.gradient_of_r(b.parts(dz_h, [b.rows]), [b.packed_before])
    return dz_h
