"""``benchmarks/compile_only/flex``: which errors of interpreted kernels are failures.

These tests compile nothing: that takes a minute, and a compiler that tests do not need.
"""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from compile_only.flex import command

FITS = {"shared": 0, "requested": 0}


@pytest.mark.parametrize("wrong", ["q", "slopes", None])
def test_learned_arrays_have_a_bound_of_their_own(wrong):
    largest = {"q": 0.01, "k": 0.01, "v": 0.01, "slopes": 0.1}
    errors = {name: bound * (1.1 if name == wrong else 0.9) for name, bound in largest.items()}
    failure = command._failure("backward 2", FITS, {"backward": errors}, 0.01, 0.1)
    assert failure == (None if wrong is None else f"wrong: {wrong}")


def test_no_error_hides_behind_nan():
    assert math.isnan(command._largest([0.1, math.nan]))
    errors = {"forward": {"forward": math.nan}}
    assert command._failure("forward", FITS, errors, 0.01, 0.1) == "wrong: forward"
