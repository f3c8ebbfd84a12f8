"""Constants are copied to a device once, and no call spoils those that calls share."""

from __future__ import annotations

from threading import Thread

import pytest
from frameworks import HAS
from subjects import HEAD_DIM, SUBJECTS

import posenc
from posenc.contract.operations import constant_array
from posenc.schemes import Sum
from posenc.testing import SchemeCase

if not HAS["torch"]:
    pytest.skip("torch is not installed", allow_module_level=True)

import array_api_compat.torch as xp
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch_operations import Operations

import posenc_torch
from posenc_torch import constants
from posenc_torch.flex.programs import replace_kernel
from posenc_torch.tracing import constant_in_programs

HEADS = 4
COPY = "lift_fresh"  # of Python numbers to a device


def tensors(case, length):
    q, k, v = (torch.randn(1, case.heads, length, case.head_dim) for _ in range(3))
    params = {name: torch.tensor(value) for name, value in case.params.items()}
    tokens = posenc.Tokens(x=torch.randn(1, length, case.hidden_dim))
    return (q, k, v, case.scheme, params), {"tokens": tokens}


def fresh(monkeypatch):
    monkeypatch.setattr(constants, "_kept", {})


def slopes(values=(0.5, 0.25), dtype=torch.float32, device="cpu"):
    return constant_array(values, dtype=dtype, device=device, xp=xp)


def test_the_second_call_of_every_scheme_copies_no_number(monkeypatch):
    fresh(monkeypatch)
    counts = {}
    for name in dict.fromkeys(("alibi", "rope", *SUBJECTS)):  # these two before their like
        scheme = SUBJECTS[name]
        args, hidden = tensors(SchemeCase(scheme), 6)
        for again in (False, True):
            with Operations() as operations:
                posenc_torch.attention(*args, causal=True, implementation="reference", **hidden)
            counts[name, again] = operations.count(COPY)
    assert counts["alibi", False] == 1
    assert counts["rope", False] == 2  # of its four: queries and keys have the same frequencies
    assert not {name for (name, again), count in counts.items() if again and count}


@pytest.mark.parametrize("implementation", posenc_torch.IMPLEMENTATIONS)
def test_no_implementation_copies_a_number_again(implementation):
    scheme = Sum(posenc.RoPE(HEAD_DIM), posenc.ALiBi(HEADS))
    q = torch.randn(1, HEADS, 300, HEAD_DIM)

    def call():
        with replace_kernel(lambda query, **_: torch.zeros_like(query)):
            posenc_torch.attention(q, q, q, scheme, causal=True, implementation=implementation)

    call()
    with Operations() as operations:
        call()
    assert operations.count(COPY) == 0


def traced(call):
    torch.jit.trace(lambda _: call(), torch.zeros(2), check_trace=False)


def faked(call):
    with FakeTensorMode():
        assert type(call()) is FakeTensor


def made_fx(call):
    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(lambda x: x + call(), tracing_mode="fake")(torch.zeros(2))


def differentiated(call):
    torch.func.grad(lambda x: (x * call()).sum())(torch.zeros(2))


def mapped(call):
    torch.vmap(lambda x: x * call())(torch.zeros(3, 2))


def functionalized(call):
    torch.func.functionalize(lambda x: x * call())(torch.zeros(2))


def pushed_forward(call):
    torch.func.jvp(lambda x: x * call(), (torch.zeros(2),), (torch.ones(2),))


def inferred(call):
    with torch.inference_mode():
        call()


def compiled(call):
    torch.compile(lambda x: x * call(), backend="eager", fullgraph=True)(torch.zeros(2))


def on_another_thread(call):
    thread = Thread(target=call)
    thread.start()
    thread.join()


PROGRAMS = [
    traced, faked, made_fx, differentiated, mapped, functionalized, pushed_forward, inferred,
    compiled, on_another_thread,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("kept", [False, True])
def test_a_program_neither_spoils_a_constant_nor_meets_a_wrong_one(program, kept, monkeypatch):
    fresh(monkeypatch)
    if kept:
        slopes()
    program(slopes)
    after = slopes()
    assert type(after) is torch.Tensor
    assert not after.is_inference()
    assert not torch._C._functorch.is_functorch_wrapped_tensor(after)
    assert after is slopes()
    x = torch.ones(2, requires_grad=True)
    (x * after).sum().backward()
    assert x.grad.tolist() == after.tolist() == [0.5, 0.25]


def test_whoever_writes_to_a_constant_spoils_only_their_own(monkeypatch):
    fresh(monkeypatch)
    slopes().mul_(2)
    assert slopes().tolist() == [0.5, 0.25]
    with torch.inference_mode():
        slopes()[:1].zero_()
    assert slopes().tolist() == [0.5, 0.25]


def test_constants_differ_by_value_and_dtype(monkeypatch):
    fresh(monkeypatch)
    values, dtypes = ((0.5, 0.25), (0.5, 0.125)), (torch.float32, torch.float64)
    for _ in range(2):
        found = [slopes(v, d) for v in values for d in dtypes]
        assert [tuple(a.tolist()) for a in found] == [values[0]] * 2 + [values[1]] * 2
        assert [a.dtype for a in found] == list(dtypes) * 2


def test_constants_are_kept_up_to_a_limit(monkeypatch):
    fresh(monkeypatch)
    monkeypatch.setattr(constants, "_LIMIT", 2)
    first, _, third = slopes((1.0,)), slopes((2.0,)), slopes((3.0,))
    assert third.tolist() == [3.0]
    assert len(constants._kept) == 2
    assert slopes((1.0,)) is first


def test_no_device_is_guessed(monkeypatch):
    fresh(monkeypatch)
    assert slopes(device="meta").device.type == "meta"  # as "cuda", it has no index
    assert not constants._kept


def test_the_mark_of_a_constant_is_that_of_torch():
    def ours(): ...

    def theirs(): ...

    constant_in_programs(ours)
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs) != {}
