"""What a fine-tuning trains, and what a step of it takes, before it begins."""

from collections.abc import Iterable
from dataclasses import dataclass

from opgrad.training.make.checks import quantity
from opgrad.tune.adapted_model import AdaptedModel
from opgrad.tune.lora import Adapter, slices

MEGABYTE = 10**6


@dataclass(frozen=True)
class Adapted:
    """A product, or some columns of its result, with an adapter beside it.

    name: the module's. role, layer, operator, bits: those of the product, see `opgrad.tune.language.Product`.
    inputs, outputs: the sizes of the last axes. rank: of the adapter. numbers: how many it has.
    """

    name: str
    role: str
    layer: int
    operator: str
    bits: int
    inputs: int
    outputs: int
    rank: int
    numbers: int


@dataclass(frozen=True)
class Summary:
    """What is trained of a language model.

    adapters: where they are. trained: how many numbers are trained. numbers: how many the weights of products have.
    base: the bytes of weights that stay as they are. rows, length: of a batch, length in tokens.
    step: the bytes that a process takes for such a batch, as `--memory` estimates them. limit: the most that it shall
        take: that of `--memory`, or a default.
    again: the number of layers that are computed again in the backward part.
    unreached: how many products do not reach the scores, and so are not trained.
    """

    adapters: list[Adapted]
    trained: int
    numbers: int
    base: int
    rows: int
    length: int
    step: int
    limit: int
    again: int
    unreached: int

    def facts(self) -> dict[str, str]:
        """All of it but the adapters, in words."""
        of_base = f"{self.trained / self.numbers:.2%} of the {self.numbers:,} in products" if self.numbers else ""
        kept = f"for a limit of {megabytes(self.limit)}"
        again = f"; {quantity(self.again, 'layer')} computed again {kept}" if self.again else ""
        batch = f"{quantity(self.rows, 'row')} of up to {quantity(self.length, 'token')}"
        lost = f"{quantity(self.unreached, 'product')} of the model do not reach the scores: it was exported wrongly"
        return {
            **({"warning": lost} if self.unreached else {}),
            "trained": ", ".join(filter(None, (quantity(self.trained, "number"), of_base))),
            "base": f"{megabytes(self.base)} of weights",
            "memory": f"about {megabytes(self.step)} for a step of {batch}{again}",
        }


def megabytes(count: int) -> str:
    """Bytes as megabytes, of 10^6 bytes as `--memory` tells them."""
    return f"{count / MEGABYTE:,.{0 if count >= 10 * MEGABYTE else 2}f} MB"


def adapted(adapters: Iterable[Adapter]) -> list[Adapted]:
    """Where adapters are."""
    found = []
    for each in adapters:
        product = each.product
        role = next(role for module, role, _ in slices(product) if module == each.name)
        numbers = each.lora.rank * (product.inputs + each.outputs) + each.lora.dora * each.outputs
        found.append(Adapted(each.name, role, product.layer, product.op, product.bits, product.inputs, each.outputs,
                             each.lora.rank, numbers))  # fmt: skip
    return found


def summary(model: AdaptedModel, rows: int, length: int) -> Summary:
    """What is trained of a model with batches of so many rows and tokens.

    Raises what `AdaptedModel.setting` raises, whose graphs it has made.
    """
    setting = model.setting(rows, length)
    plan = setting.plan
    assert plan is not None
    weights = {model.base.place_of(each.weight): each.inputs * each.outputs for each in model.base.products}
    trained = sum(each.size for each in setting.artifacts.trainable.values())
    return Summary(
        adapters=adapted(model.adapters), trained=trained, numbers=sum(weights.values()), base=plan.base, rows=rows,
        length=length, step=plan.bytes, limit=plan.limit.bytes, again=len(plan.segments),
        unreached=model.base.unreached,
    )  # fmt: skip
