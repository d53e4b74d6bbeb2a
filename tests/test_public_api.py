"""Names, parameters and defaults of the public API are those on record, so that no change passes unseen.

After a deliberate change, write the record anew and look at the difference:
`python tests/test_public_api.py`
"""

import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RECORD = Path(__file__).parent / "data" / "public_api.txt"
# The modules whose import path the documentation gives; their public names where they have private ones without `_`.
MODULES: dict[str, tuple[str, ...]] = {
    "opgrad": (),
    "opgrad.gradients": (),
    "opgrad.jax": (),
    "opgrad.onnxruntime": (),
    "opgrad.optim": (),
    "opgrad.post_ops": (),
    "opgrad.torch": (),
    "opgrad.torch.optim": (),
    "opgrad.training": (),
    "opgrad.training.api": (),
    "opgrad.training.artifacts": (),
    "opgrad.training.onnxblock": (),
    "opgrad.training.onnxblock.blocks": (),
    "opgrad.training.onnxblock.loss": (),
    "opgrad.training.onnxblock.optim": (),
    "opgrad.training.export": (),
    "opgrad.contract": ("Spec",),
    "opgrad.ops": ("operators",),
    "opgrad.torch.export": ("decompositions",),
    "opgrad.tune": (),
}


# The modules with classes from which those of others are made.
BASES = ("opgrad.training.onnxblock",)


def public_names(module: ModuleType) -> list[str]:
    """What MODULES or a module itself says is public; without `__all__`, what it defines."""
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    listed = MODULES[module.__name__] or getattr(module, "__all__", defined)
    return sorted(name for name in listed if not name.startswith("_"))


def parameters(value: Any) -> str:
    """The parameters of a callable with their defaults. Annotations are left out, as they name private modules."""
    try:
        signature = inspect.signature(value)
    except ValueError:  # a built-in exception's constructor has none
        return "(...)"
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def lines_of_class(path: str, kind: type) -> Iterator[str]:
    """The public members of a class that opgrad has written, but for fields, which stand in the class's signature, and
    members of a public class that it inherits."""
    public = {getattr(loaded, name) for loaded in map(importlib.import_module, BASES) for name in public_names(loaded)}
    fields = set(getattr(kind, "_fields", ())) | set(getattr(kind, "__dataclass_fields__", ()))
    for name in sorted(dir(kind)):
        owner = next(each for each in kind.__mro__ if name in vars(each) or each is object)
        if name.startswith("_") or not owner.__module__.startswith("opgrad") or (owner is not kind and owner in public):
            continue
        member = getattr(kind, name)
        if callable(member) or name not in fields:
            yield f"{path}.{name}{parameters(member) if callable(member) else ''}"


def lines_of(module: str) -> list[str]:
    """A line for each public name of a module, and for each public member of a class."""
    loaded, lines = importlib.import_module(module), []
    for name in public_names(loaded):
        value, path = getattr(loaded, name), f"{module}.{name}"
        is_enum = inspect.isclass(value) and issubclass(value, Enum)  # what its class takes is Python's own matter
        lines.append(path + (parameters(value) if callable(value) and not is_enum else ""))
        if inspect.isclass(value):
            lines += lines_of_class(path, value)
    return lines


@pytest.mark.parametrize("module", MODULES)
def test_the_public_api_is_the_one_on_record(module: str) -> None:
    for library in ("jax", "torch", "onnxruntime"):
        if module.startswith(f"opgrad.{library}"):
            pytest.importorskip(library)
    recorded = RECORD.read_text(encoding="utf-8").split("\n\n")
    (expected,) = (lines[1:] for lines in map(str.splitlines, recorded) if lines[0] == f"[{module}]")
    assert lines_of(module) == expected


def test_the_record_has_these_modules_and_no_others() -> None:
    text = RECORD.read_text(encoding="utf-8")
    assert [line[1:-1] for line in text.splitlines() if line.startswith("[")] == sorted(MODULES)


if __name__ == "__main__":
    sections = ["\n".join([f"[{module}]", *lines_of(module)]) for module in sorted(MODULES)]
    RECORD.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
