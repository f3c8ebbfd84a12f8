"""Conformance tests for positional encodings, including third-party ones.

>>> import posenc
>>> from posenc.testing import check_scheme
>>> check_scheme(posenc.ALiBi(num_heads=4), frameworks=["numpy"])

In a test file, one test per law, framework and implementation::

    from posenc.testing import parametrize_laws

    @parametrize_laws([MyScheme(num_heads=4)])
    def test_laws(law, scheme):
        law(scheme)

Laws of the scheme itself are checked on NumPy. Laws of attention are checked on every
implementation of every installed framework, eager and compiled. ``laws()`` lists them.

``check_function`` holds any function, of NumPy, torch or JAX, against a scheme.
"""

from posenc.testing.attention_case import AttentionCase
from posenc.testing.check import check_scheme, laws, parametrize_laws
from posenc.testing.framework import Framework, Function, Host, frameworks
from posenc.testing.functions import FunctionError, check_function, parametrize_checks
from posenc.testing.law import BrokenLawError, Law
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tolerances import assert_near

__all__ = [
    "AttentionCase",
    "BrokenLawError",
    "Framework",
    "Function",
    "FunctionError",
    "Host",
    "Law",
    "SchemeCase",
    "assert_near",
    "check_function",
    "check_scheme",
    "frameworks",
    "laws",
    "parametrize_checks",
    "parametrize_laws",
]
