"""A wrong call is an error that names the argument."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import HAS
from subjects import DIM, HEADS, SUBJECTS, normal, params_of

import posenc

Q = normal((2, HEADS, 5, DIM), 0, "float32")
POS = np.arange(5)
T5, FORGETTING = posenc.T5Bias(HEADS), SUBJECTS["forgetting"]
TABLE = params_of(T5)
GATES = {"scheme": FORGETTING, "params": params_of(FORGETTING)}
at = lambda q, k=POS: {"q_pos": q, "k_pos": k}  # noqa: E731
segments = lambda q, k=POS: {"q_seg": q, "k_seg": k}  # noqa: E731

# What differs from a good call, the error, and what its message must name.
ATTENTION = {
    "q-three-axes": ({"q": Q[0]}, ValueError, r"\bq\b"),
    "q-integers": ({"q": Q.astype(np.int64)}, TypeError, r"\bq\b"),
    "k-empty": ({"k": Q[:, :, :0], "v": Q[:, :, :0]}, ValueError, r"\bk\b"),
    "batch": ({"k": Q[:1], "v": Q[:1]}, ValueError, "batch"),
    "k-v-length": ({"v": Q[:, :, :4]}, ValueError, "k and v"),
    "k-v-heads": ({"v": Q[:, :2]}, ValueError, "k and v"),
    "head-dim": ({"k": Q[..., :4]}, ValueError, "head_dim"),
    "groups": ({"k": Q[:, :3], "v": Q[:, :3]}, ValueError, "heads"),
    "scheme-heads": ({"scheme": posenc.ALiBi(3)}, ValueError, "num_heads=3"),
    "scheme-name": ({"scheme": "alibi"}, TypeError, "scheme"),
    "scheme-class": ({"scheme": posenc.ALiBi}, TypeError, "scheme"),
    "rope-channels": ({"scheme": posenc.RoPE(16)}, ValueError, "head_dim=16"),
    "param-missing": ({"scheme": T5}, ValueError, "table"),
    "param-extra": ({"params": {"slopes": POS * 1.0}}, ValueError, "slopes"),
    "param-near": ({"scheme": T5, "params": {"tabel": TABLE["table"]}}, ValueError, "'table'"),
    "param-shape": ({"scheme": T5, "params": {"table": POS * 1.0}}, ValueError, "table"),
    "param-integers": ({"scheme": T5, "params": {"table": POS}}, TypeError, "table"),
    "param-list": ({"scheme": T5, "params": {"table": [1.0]}}, TypeError, "table"),
    "pos-floats": (at(POS * 1.0), TypeError, "q_pos"),
    "pos-half": (at(POS, POS.astype(np.float16)), TypeError, "k_pos"),
    "pos-bool": (at(POS > 2), TypeError, "q_pos"),
    "pos-list": (at([0, 1, 2, 3, 4]), TypeError, "q_pos"),
    "pos-axes": (at(POS[None, None]), ValueError, "q_pos"),
    "pos-length": (at(POS[:4]), ValueError, "q_pos"),
    "pos-batch": (at(np.stack([POS] * 3)), ValueError, "q_pos"),
    "pos-alone": ({"q_pos": POS}, ValueError, "k_pos"),
    "k-pos-alone": ({"k_pos": POS}, ValueError, "q_pos"),
    "seg-floats": (segments(POS * 1.0), TypeError, "q_seg"),
    "seg-length": (segments(POS, POS[:4]), ValueError, "k_seg"),
    "seg-alone": ({"k_seg": POS}, ValueError, "q_seg"),
    "window-none": ({"window": 0}, ValueError, "window"),
    "window-float": ({"window": 2.5}, TypeError, "window"),
    "window-bool": ({"window": True}, TypeError, "window"),
    "path": ({"path": "refrence"}, ValueError, "'reference'"),
    "gates-without-x": (GATES, ValueError, r"\bx\b"),
    "x-length": (GATES | {"x": normal((2, 4, 6), 0, "float32")}, ValueError, r"\bx\b"),
    "x-axes": (GATES | {"x": normal((5, 6), 0, "float32")}, ValueError, r"\bx\b"),
    "x-batch": (GATES | {"x": normal((3, 5, 6), 0, "float32")}, ValueError, r"\bx\b"),
    "coords-alone": (GATES | {"q_coords": Q[..., 0]}, ValueError, "k_coords"),
    "coords-shape": (
        GATES | {"q_coords": Q[..., 0], "k_coords": Q[:, :2, :, 0]}, ValueError, "k_coords",
    ),
    "coords-without-gates": (
        {"q_coords": Q[..., 0], "k_coords": Q[..., 0]}, ValueError, "q_coords",
    ),
    "coords-floats": (
        GATES | {"q_coords": Q[..., 0], "k_coords": [[[0.0]]]}, (TypeError, ValueError), "k_coords",
    ),
    "scale-text": ({"scale": "large"}, TypeError, "scale"),
    "scale-nan": ({"scale": float("nan")}, ValueError, "scale"),
    "causal-text": ({"causal": "False"}, TypeError, "causal"),
    "transformed-text": ({"k_transformed": "no"}, TypeError, "k_transformed"),
    "params-list": ({"params": [Q]}, TypeError, "params must map"),
    "params-array": ({"params": Q}, TypeError, "params must map"),
    "v-list": ({"v": [[[[1.0]]]]}, TypeError, "v must be an array"),
    "q-none": ({"q": None}, TypeError, "q must be an array"),
}  # fmt: skip
GOOD = {"q": Q, "k": Q, "v": Q, "scheme": posenc.ALiBi(HEADS)}
BACKENDS = [
    name if name == "numpy" or HAS[name]
    else pytest.param(name, marks=pytest.mark.skip(reason=f"{name} is not installed"))
    for name in ("numpy", "torch", "jax")
]  # fmt: skip


def call(backend, arguments):
    """The call as a user of this backend would write it."""
    if backend == "numpy":
        return posenc.attention(**arguments)
    if backend == "torch":
        import torch

        import posenc_torch

        return posenc_torch.attention(**converted(arguments, torch.tensor))
    import jax.numpy as jnp

    import posenc_jax

    for name in set("qkv") & arguments.keys():
        if getattr(arguments[name], "ndim", 0) == 4:
            arguments[name] = np.swapaxes(arguments[name], 1, 2)
    return posenc_jax.attention(**converted(arguments, jnp.asarray))


def converted(value, array):
    if isinstance(value, dict):
        return {name: converted(v, array) for name, v in value.items()}
    return array(value) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("wrong", ATTENTION)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_names_what_is_wrong(backend, wrong):
    change, error, message = ATTENTION[wrong]
    with pytest.raises(error, match=message):
        call(backend, GOOD | change)


def test_the_good_call_is_good():
    assert posenc.attention(**GOOD).shape == Q.shape


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "bool"])
def test_torch_positions_are_integers(dtype):
    import torch

    import posenc_torch

    pos = torch.arange(5).to(getattr(torch, dtype))
    with pytest.raises(TypeError, match="q_pos"):
        posenc.bias(posenc.ALiBi(HEADS), pos, pos)
    with pytest.raises(TypeError, match="q_pos"):
        call("torch", GOOD | at(pos, pos))
    with pytest.raises(TypeError, match="pos"):
        posenc_torch.Position(posenc.Sinusoidal(8)).embed(torch.zeros(1, 5, 8), pos)


ALIBI, ROPE, LEARNED = posenc.ALiBi(2), posenc.RoPE(DIM), posenc.Learned(max_len=4, dim=2)
ROWS = {"table": np.zeros((4, 2), np.float32)}
EVALUATED = {
    "bias-floats": (lambda: posenc.bias(ALIBI, POS * 1.0, POS), TypeError, "q_pos"),
    "bias-list": (lambda: posenc.bias(ALIBI, [0, 1], [0, 1]), TypeError, "q_pos"),
    "bias-batches": (
        lambda: posenc.bias(ALIBI, np.ones((2, 3), int), np.ones((3, 3), int)), ValueError, "q_pos",
    ),
    "bias-axes": (lambda: posenc.bias(ALIBI, np.asarray(3), POS), ValueError, "q_pos"),
    "bias-of-gates": (
        lambda: posenc.bias(FORGETTING, POS, POS, GATES["params"]), ValueError, "gates",
    ),
    "bias-scheme": (lambda: posenc.bias(posenc.ALiBi, POS, POS), TypeError, "scheme"),
    "bias-param-list": (lambda: posenc.bias(T5, POS, POS, {"table": [1]}), TypeError, "table"),
    "transform-role": (lambda: posenc.transform(ROPE, Q, POS, role="q"), ValueError, "role"),
    "transform-length": (
        lambda: posenc.transform(ROPE, Q, POS[:3], role="key"), ValueError, r"\bpos\b",
    ),
    "transform-batch": (
        lambda: posenc.transform(ROPE, Q, np.stack([POS] * 3), role="key"), ValueError, r"\bpos\b",
    ),
    "transform-integers": (
        lambda: posenc.transform(ROPE, POS[None], POS, role="key"), (ValueError, TypeError),
        r"\bx\b",
    ),
    "transform-channels": (
        lambda: posenc.transform(ROPE, Q[..., :6], POS, role="key"), ValueError, "head_dim=8",
    ),
    "embedding-floats": (lambda: posenc.embedding(LEARNED, POS * 1.0, ROWS), TypeError, "pos"),
    "embedding-params": (lambda: posenc.embedding(LEARNED, POS), ValueError, "table"),
    "embedding-beyond": (lambda: posenc.embedding(LEARNED, POS, ROWS), IndexError, "4"),
    "embedding-negative": (lambda: posenc.embedding(LEARNED, -POS, ROWS), IndexError, "-4"),
    "coordinates-axes": (
        lambda: posenc.coordinates(FORGETTING, Q, GATES["params"]), ValueError, r"\bx\b",
    ),
    "coordinates-at": (
        lambda: posenc.coordinates(
            FORGETTING, normal((2, 5, 6), 0), GATES["params"], at_pos=POS
        ), ValueError, "at_pos",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", EVALUATED)
def test_evaluation_names_what_is_wrong(wrong):
    function, error, message = EVALUATED[wrong]
    with pytest.raises(error, match=message):
        function()
