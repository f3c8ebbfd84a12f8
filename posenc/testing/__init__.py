"""The laws that every scheme obeys, for schemes of anybody's.

>>> import posenc
>>> from posenc.testing import check_scheme
>>> check_scheme(posenc.ALiBi(num_heads=4), frameworks=["numpy"])

In a test file, one test a law, framework and implementation::

    from posenc.testing import parametrize_laws

    @parametrize_laws([MyScheme(num_heads=4)])
    def test_laws(law, scheme):
        law(scheme)

Laws of the scheme itself are tried on NumPy; laws of attention on every implementation of every
framework that is installed, compiled ones too. ``laws()`` lists them.
"""

from posenc.testing.check import check_scheme, laws, parametrize_laws
from posenc.testing.framework import Framework, frameworks
from posenc.testing.law import BrokenLawError, Law
from posenc.testing.problem import Problem
from posenc.testing.subject import Subject
from posenc.testing.tolerances import assert_near

__all__ = [
    "BrokenLawError",
    "Framework",
    "Law",
    "Problem",
    "Subject",
    "assert_near",
    "check_scheme",
    "frameworks",
    "laws",
    "parametrize_laws",
]
