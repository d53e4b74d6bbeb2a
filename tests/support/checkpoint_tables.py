"""The tables of a checkpoint file, read by the flatbuffers library from the schema's facts, apart from opgrad."""

from pathlib import Path

from flatbuffers import encode, number_types, packer
from flatbuffers.table import Table

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"

TENSOR = [
    ("name", "text"),
    ("doc_string", "text"),
    ("dims", "int64s"),
    ("data_type", "Int32"),
    ("raw_data", "bytes"),
    ("string_data", None),
    ("external_data_offset", "Int64"),
]
SCHEMA = [
    ("version", "Int32"),
    (
        "module_state",
        (
            ("requires_grad_params", [TENSOR]),
            ("frozen_params", [TENSOR]),
            ("is_nominal_state", "Bool"),
            ("has_external_data", "Bool"),
        ),
    ),
    (
        "optimizer_groups",
        [
            [
                ("group_name", "text"),
                ("step", "Int64"),
                ("initial_learning_rate", "Float32"),
                ("optimizer_states", [[("param_name", "text"), ("momentums", [TENSOR])]]),
            ]
        ],
    ),
    (
        "property_bag",
        (
            ("ints", [[("name", "text"), ("value", "Int64")]]),
            ("floats", [[("name", "text"), ("value", "Float32")]]),
            ("strings", [[("name", "text"), ("value", "text")]]),
        ),
    ),
]


def tables(path):
    """The tables as dictionaries, without the fields that are absent."""
    content = path.read_bytes()
    assert content[4:8] == b"ODTC"
    return _table(Table(content, encode.Get(packer.uoffset, content, 0)), SCHEMA)


def _table(table, schema):
    places = table.Pos - table.Get(number_types.SOffsetTFlags, table.Pos)
    count = (table.Get(number_types.VOffsetTFlags, places) - 4) // 2
    assert count <= len(schema)
    offsets = [(*schema[index], table.Offset(4 + 2 * index)) for index in range(count)]
    return {name: _value(table, kind, offset) for name, kind, offset in offsets if offset}


def _value(table, kind, offset):
    if kind == "text":
        return table.String(table.Pos + offset).decode()
    if kind == "bytes":
        start = table.Vector(offset)
        return table.Bytes[start : start + table.VectorLen(offset)]
    if kind == "int64s":
        start = table.Vector(offset)
        return [table.Get(number_types.Int64Flags, start + 8 * index) for index in range(table.VectorLen(offset))]
    if isinstance(kind, str):
        return table.Get(getattr(number_types, f"{kind}Flags"), table.Pos + offset)
    if isinstance(kind, tuple):
        return _table(Table(table.Bytes, table.Indirect(table.Pos + offset)), kind)
    start = table.Vector(offset)
    places = [table.Indirect(start + 4 * index) for index in range(table.VectorLen(offset))]
    return [_table(Table(table.Bytes, place), kind[0]) for place in places]
