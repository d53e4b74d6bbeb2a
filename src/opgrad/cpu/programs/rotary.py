"""The programs of rotary embedding and its gradient: positions are checked, then each part turns some heads."""

from opgrad.contract.signature import Problem, wrong_index
from opgrad.cpu.kernels.rotary import turn
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.gather import check_indices
from opgrad.cpu.runtime.program import Program
from opgrad.ops.reference.rotary import PACKED, rotation


def rotary_embedding(problem: Problem) -> Program:
    return _turning(problem, "rotary_embedding", "x", "y", 1.0)


def rotary_embedding_grad(problem: Problem) -> Program:
    return _turning(problem, "rotary_embedding_grad", "dy", "dx", -1.0)


def _turning(problem: Problem, operator: str, source: str, target: str, sign: float) -> Program:
    steps, sizes = ProgramSteps(problem), rotation(operator, source, problem.shapes, dict(problem.attributes))
    cos, positions, explain = problem.shapes["cos_cache"], problem["position_ids"], None
    count = cos[0] if positions else 0
    if positions:
        check_indices(steps, count, "position_ids")
        explain = wrong_index(problem, operator, count, "position_ids")
    rows = sizes.batch * sizes.heads * sizes.tokens
    if rows * sizes.size:
        heads = {"tokens": sizes.tokens, "heads": sizes.heads, "tokens_inside": sizes.heads_first}
        heads |= {"size": sizes.size, "half": sizes.half, "count": count}
        batch_step = sizes.tokens if len(cos) == PACKED and cos[0] > 1 else 0
        tables = {"cos": problem["cos_cache"], "sin": problem["sin_cache"], "positions": positions}
        given = {"x": problem[source], "y": problem[target], **tables}
        steps.add(turn, rows, **heads, batch_step=batch_step, sign=sign, **given)
    return steps.program(explain=explain)
