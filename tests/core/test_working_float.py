"""The working dtype: float64 if anything is, else float32."""

import numpy as np
import pytest

import posenc
from posenc.attn.prepare import prepare
from posenc.contract.params import working_dtype


@pytest.mark.parametrize("absent", [None, [1.0], "x"])
def test_what_has_no_dtype_is_not_float64(absent):
    # np.dtype("float64") == None is True in NumPy.
    single, double = np.ones(2, np.float32), np.ones(2)
    assert working_dtype([single, absent], xp=np) == np.float32
    assert working_dtype([single, absent, double], xp=np) == np.float64


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_call_works_in_the_float_of_its_arguments(dtype):
    x = np.ones((1, 2, 3, 4), dtype)
    call = prepare(x, x, x, posenc.ALiBi(num_heads=2))
    assert call.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert call.bias().dtype == call.dtype
    wide = posenc.T5Bias(num_heads=2)
    params = {"table": np.zeros((2, 32))}
    assert prepare(x, x, x, wide, params).dtype == np.float64
