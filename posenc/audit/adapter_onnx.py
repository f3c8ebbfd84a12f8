"""ONNX: its operator ``RotaryEmbedding``, by the reference of ``onnx`` and by ONNX Runtime.

Cosines and sines are an input of the operator: a float32 table of the definition's angles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from posenc.audit.adapters import candidate
from posenc.audit.candidate import Candidate, Sizes
from posenc.testing.framework import Host

_OPSET = 23  # the first that has the operator
_LABELS: dict[str, tuple[bool, int | None]] = {
    "rope": (False, None),
    "rope:layout=interleaved": (True, None),
    "rope:rotary_dim=32": (False, 32),
    "rope:layout=interleaved,rotary_dim=32": (True, 32),
}
_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
Run = Callable[[Mapping[str, Host]], list[Any]]


def candidates(grid: str) -> Iterator[Candidate]:
    """By the reference evaluator of ``onnx``."""
    from onnx.reference import ReferenceEvaluator

    return _candidates("onnx", lambda model: partial(ReferenceEvaluator(model).run, None))


def candidates_of_runtime(grid: str) -> Iterator[Candidate]:
    """By ONNX Runtime on the processor."""
    from onnxruntime import InferenceSession

    def ready(model: onnx.ModelProto) -> Run:
        providers = ["CPUExecutionProvider"]
        session = InferenceSession(model.SerializeToString(), providers=providers)
        return partial(session.run, None)

    return _candidates("onnxruntime", ready)


def _candidates(name: str, ready: Callable[[onnx.ModelProto], Run]) -> Iterator[Candidate]:
    for label, (interleaved, width) in _LABELS.items():
        said = f"interleaved={int(interleaved)}, rotary_embedding_dim={width or 0}"
        yield candidate(
            name, f"RotaryEmbedding({said})", label, "rotation",
            partial(_rotation, ready, interleaved, width), framework="numpy",
            dtypes=("float32", "float16"), differentiable=False,
        )  # fmt: skip


def _rotation(
    ready: Callable[[onnx.ModelProto], Run], interleaved: bool, width: int | None, sizes: Sizes
) -> Callable[..., Host]:
    pairs = (width or sizes.head_dim) // 2
    angles = np.arange(sizes.max_len)[:, None] * 10_000.0 ** -(np.arange(pairs) / pairs)
    runs: dict[str, Run] = {}

    def f(x: Host, pos: Host) -> Host:
        name = x.dtype.name
        if name not in runs:
            runs[name] = ready(_model(_TYPES[name], interleaved, width or 0))
        tables = {"cos": np.cos(angles).astype(x.dtype), "sin": np.sin(angles).astype(x.dtype)}
        return np.asarray(runs[name]({"x": x, **tables, "pos": np.asarray(pos, np.int64)})[0])

    return f


def _model(element: int, interleaved: bool, width: int) -> onnx.ModelProto:
    node = helper.make_node(
        "RotaryEmbedding", ["x", "cos", "sin", "pos"], ["y"], interleaved=int(interleaved),
        rotary_embedding_dim=width,
    )  # fmt: skip
    shapes = {"x": "bhld", "cos": "nr", "sin": "nr"}
    inputs = [helper.make_tensor_value_info(n, element, list(s)) for n, s in shapes.items()]
    inputs.append(helper.make_tensor_value_info("pos", TensorProto.INT64, ["b", "l"]))
    output = helper.make_tensor_value_info("y", element, list("bhld"))
    graph = helper.make_graph([node], "rotation", inputs, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10)
