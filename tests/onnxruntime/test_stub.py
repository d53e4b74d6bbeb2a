"""The shared object that Python writes, the ways round it, and what opgrad relies on in the installed onnxruntime."""

import ctypes
import importlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx_models import one_node

from opgrad.onnxruntime import InferenceSession, abi, private, register, sessions

RUNS_HERE = sys.platform == "linux" and os.uname().machine in sessions.MACHINES


@pytest.mark.skipif(not RUNS_HERE, reason="the shared object is for Linux on x86_64 and aarch64")
def test_shared_object_calls_the_address_in_the_slot(tmp_path):
    path = tmp_path / "stub.so"
    path.write_bytes(sessions.shared_object(os.uname().machine, "stub.so"))
    loaded = ctypes.CDLL(str(path))
    seen = []
    receive = abi.callback(lambda options, base: seen.append((options, base)) or 7, ctypes.c_size_t, 2)
    ctypes.c_size_t.in_dll(loaded, sessions.SLOT).value = abi.address_of(receive)
    assert loaded.RegisterCustomOps(ctypes.c_size_t(1), ctypes.c_size_t(2)) == 7
    assert seen == [(1, 2)]


@pytest.mark.parametrize("machine", sessions.MACHINES)
def test_segments_cover_the_file_and_match_its_pages(machine):
    image = sessions.shared_object(machine, "stub.so")
    header = sessions.HEADER.unpack_from(image)
    assert header[0] == b"\x7fELF\x02\x01\x01" + bytes(9)
    assert header[2] == sessions.MACHINES[machine][0]
    segments = list(sessions.SEGMENT.iter_unpack(image[header[5] : header[5] + 4 * sessions.SEGMENT.size]))
    loads = [segment for segment in segments if segment[0] == sessions.LOAD]
    assert [flags for _, flags, *_ in loads] == [sessions.READ | sessions.EXECUTE, sessions.READ | sessions.WRITE]
    for _, _, offset, address, _, size, in_memory, alignment in loads:
        assert offset % alignment == address % alignment
        assert offset + size <= len(image)
        assert size == in_memory
    assert loads[1][2] + loads[1][5] == len(image)


@pytest.mark.parametrize("slot", [0x10240, 0x20FF8, 0x11000])
def test_aarch64_jump_reads_the_slot(slot):
    source = 0x1C0
    bti, page, load, branch = struct.unpack("<4I", sessions.jump_aarch64(source, slot))
    assert (bti, branch) == (0xD503245F, 0xD61F0200)
    pages = (page >> 5 & 0x7FFFF) << 2 | page >> 29 & 3
    assert page & 0x9F00001F == 0x90000010
    assert load & 0xFFC003FF == 0xF9400210
    assert (source & ~0xFFF) + (pages << 12) + (load >> 10 & 0xFFF) * 8 == slot


def test_stub_goes_to_a_file_where_there_is_no_memory_file(monkeypatch):
    def refuse(*_):
        raise OSError

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    path = Path(sessions.write(b"image"))
    assert path.read_bytes() == b"image"


PACKAGE = Path(onnxruntime.__file__).parent / "capi"


@pytest.mark.skipif(
    not any(found for pattern in sessions.PATTERNS for found in PACKAGE.glob(pattern)),
    reason="this onnxruntime comes without its C library (before 1.19)",
)
def test_package_route_registers_too():
    """The route of macOS and Windows, here through the C library in the Linux package."""
    script = """
import numpy as np
from opgrad.onnxruntime import InferenceSession, sessions
from onnx_models import one_node
sessions.MACHINES.clear()
model = one_node("ReluGrad", [("a", "float32"), ("b", "float32")], [("c", "float32")])
c, = InferenceSession(model).run(None, {"a": np.full(2, 3, "f4"), "b": np.ones(2, "f4")})
assert c.tolist() == [3, 3]
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1] / "support")


def test_unknown_platform_says_what_to_do(monkeypatch):
    monkeypatch.setattr(sessions, "MACHINES", {})
    monkeypatch.setattr(sessions, "PATTERNS", ())
    sessions._package_library.cache_clear()
    with pytest.raises(RuntimeError, match=r"cannot register operators .* comes without its C library"):
        register(onnxruntime.SessionOptions())


def test_unknown_options_object_says_what_to_do(monkeypatch):
    monkeypatch.setattr(sessions, "MACHINES", {})
    monkeypatch.setattr(private, "PYBIND_WORDS", 17)
    with pytest.raises(RuntimeError, match=r"SessionOptions is not the object .* expected Linux"):
        register(onnxruntime.SessionOptions())


@pytest.mark.parametrize("version", ["1.17.3", "1.9.0"])
def test_old_runtime_says_what_to_do(monkeypatch, version):
    monkeypatch.setattr(onnxruntime, "__version__", version)
    with pytest.raises(RuntimeError, match=rf"version {version}, expected 1.18 or later; .* pip install"):
        register(onnxruntime.SessionOptions())


def test_missing_table_says_what_to_do():
    get_api = abi.callback(lambda _: 0, ctypes.c_size_t, 1)
    base = (ctypes.c_size_t * 2)(abi.address_of(get_api))
    with pytest.raises(RuntimeError, match=r"expected 1.18 or later"):
        abi.table(ctypes.addressof(base))


def test_missing_runtime_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "opgrad.onnxruntime.sessions")
    monkeypatch.delattr("opgrad.onnxruntime.sessions")
    with pytest.raises(ImportError, match=r"install it with: pip install 'opgrad\[onnx\]'"):
        importlib.import_module("opgrad.onnxruntime").register  # noqa: B018


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match=r"of type dict, expected onnxruntime.SessionOptions"):
        register({})


def test_warm_session_leaves_numba_alone():
    model = one_node("ReluGrad", [("a", "float32"), ("b", "float32")], [("c", "float32")])
    use = f"""
import sys, numpy as np
from opgrad.onnxruntime import InferenceSession
session = InferenceSession({model!r})
session.run(None, {{"a": np.ones(3, "f4"), "b": np.ones(3, "f4")}})
"""
    subprocess.run([sys.executable, "-c", use], check=True)
    subprocess.run([sys.executable, "-c", use + "assert 'numba' not in sys.modules"], check=True)


@pytest.mark.parametrize("machine", sessions.MACHINES)
def test_another_reader_finds_in_the_shared_object_what_a_linker_would_write(machine):
    lief = pytest.importorskip("lief")
    lief.logging.disable()
    read = lief.parse(list(sessions.shared_object(machine, "stub.so")))
    assert read.header.file_type == lief.ELF.Header.FILE_TYPE.DYN
    assert read.header.machine_type.value == sessions.MACHINES[machine][0]
    assert [(each.name, each.size) for each in read.dynamic_symbols][1:] == [
        (sessions.ENTRY, len(sessions.MACHINES[machine][1](0, 0))),
        (sessions.SLOT, sessions.SLOT_BYTES),
    ]
    assert read.has_nx
    assert not list(read.relocations)
    assert not list(read.libraries)
    code, data = (each for each in read.segments if each.type == lief.ELF.Segment.TYPE.LOAD)
    entry, slot = (read.get_dynamic_symbol(name).value for name in (sessions.ENTRY, sessions.SLOT))
    assert code.virtual_address <= entry < code.virtual_address + code.virtual_size
    assert data.virtual_address <= slot <= data.virtual_address + data.virtual_size - sessions.SLOT_BYTES
    assert read.get(lief.ELF.DynamicEntry.TAG.SONAME).name == "stub.so"


def stock_error(model, feeds=None):
    """The error of loading a model in stock onnxruntime or, with `feeds`, of running it."""
    with pytest.raises(Exception, match=r"ONNXRuntimeError") as caught:
        onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    return caught.value


def model_of(node, domain="com.microsoft", elements=TensorProto.FLOAT):
    x = helper.make_tensor_value_info("x", elements, ["N"])
    graph = helper.make_graph([node], "graph", [x], [helper.make_tensor_value_info("y", elements, None)])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize(
    ("node", "operator"),
    [
        (helper.make_node("Nothing", ["x"], ["y"], domain="com.microsoft"), "com.microsoft:Nothing"),
        (helper.make_node("BitwiseNot", ["x"], ["y"]), None),
    ],
)
def test_errors_of_models_name_operator_and_reason(node, operator):
    error = stock_error(model_of(node))
    assert private.unknown_operator(error) == operator
    assert private.BEFORE_REASON[1] in str(error)
    assert "onnxruntime/core" not in private.reason(error)
    assert private.BEFORE_REASON[1] not in private.reason(error)


def test_a_type_without_kernel_is_an_unknown_operator():
    error = stock_error(model_of(helper.make_node("ThresholdedRelu", ["x"], ["y"]), elements=TensorProto.DOUBLE))
    assert private.unknown_operator(error) == "ThresholdedRelu"


def test_errors_of_runs_tell_who_refused():
    reshape = helper.make_node("Reshape", ["x", "shape"], ["y"])
    model = model_of(reshape)
    model.graph.initializer.append(helper.make_tensor("shape", TensorProto.INT64, [2], [7, 3]))
    error = stock_error(model, {"x": np.zeros(4, np.float32)})
    assert private.node_refused(error)
    assert all(mark in str(error) for mark in private.BEFORE_REASON)


def test_session_options_lie_in_memory_as_known():
    assert private.options_pointer(onnxruntime.SessionOptions())
    assert private.options_pointer(object()) is None


# Nodes without attributes: of a whole number, of text, of numbers, and one that opgrad refuses if it is there.
BARE = [
    one_node("SoftmaxGrad_13", [("dy", "float32"), ("y", "float32")], [("dx", "float32")]),
    one_node(
        "SoftmaxCrossEntropyLossGrad",
        [("dy", "float32"), ("log_prob", "float32"), ("labels", "int64")],
        [("dx", "float32")],
    ),
    one_node("ConvGrad", [("dy", "float32"), ("x", "float32"), ("w", "float32")], [("dx", "float32")]),
    one_node("QuickGeluGrad", [("dy", "float32"), ("x", "float32")], [("dx", "float32")]),
]


# Without its name, which cannot be asked for then, and without the text.
@pytest.mark.parametrize(("name", "value"), [("NOBODYS", None), ("NO_ATTRIBUTE", "other words")])
@pytest.mark.parametrize("model", BARE, ids=["int", "text", "ints", "float"])
def test_a_missing_attribute_is_found(monkeypatch, model, name, value):
    monkeypatch.setattr(private, name, value)
    InferenceSession(model)


def test_what_is_no_missing_attribute_stays_an_error():
    def read(name):
        raise RuntimeError(f"no {name}")

    assert private.is_missing(RuntimeError("no axis"), "axis", read)
    assert not private.is_missing(RuntimeError("axis is of type FLOAT"), "axis", read)
