"""The programs of rotary embedding and its gradient: positions are checked, then each part turns some heads."""

from opgrad.contract.problem import Problem
from opgrad.contract.ranges import wrong_index
from opgrad.contract.rotary import PACKED, rotation
from opgrad.cpu.kernels.rotary import Angles, HeadRows, turn
from opgrad.cpu.programs.gather import index_steps
from opgrad.cpu.programs.program import Program, shared_out
from opgrad.cpu.programs.workspace import Workspace


def rotary_embedding(problem: Problem) -> Program:
    return _turning(problem, "rotary_embedding", "x", "y", 1.0)


def rotary_embedding_grad(problem: Problem) -> Program:
    return _turning(problem, "rotary_embedding_grad", "dy", "dx", -1.0)


def _turning(problem: Problem, operator: str, source: str, target: str, sign: float) -> Program:
    shapes = problem.shapes
    sizes = rotation(operator, source, shapes, dict(problem.attributes))
    cos, positions = shapes["cos_cache"], problem["position_ids"]
    count = cos[0] if positions else 0
    workspace, name = Workspace(), "position_ids"
    steps = index_steps(problem, workspace, count, name) if positions else []
    explain = wrong_index(problem, operator, count, name) if positions else None
    rows = sizes.batch * sizes.heads * sizes.tokens
    if rows * sizes.size:
        arguments = {
            "heads": HeadRows(sizes.tokens, sizes.heads, int(sizes.heads_first), sizes.size, sizes.half),
            "angles": Angles(sizes.tokens if len(cos) == PACKED and cos[0] > 1 else 0, count),
            "interleaved": problem.attributes["interleaved"],
            "sign": sign,
            "positions": positions,
        }
        arguments |= {"x": problem[source], "y": problem[target]}
        arguments |= {"cos": problem["cos_cache"], "sin": problem["sin_cache"]}
        steps = [*steps, shared_out(turn, rows, problem.bytes / rows, arguments)]
    return Program(steps, workspace, explain)
