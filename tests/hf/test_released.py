"""Configurations as models were released with them, read by transformers and by posenc."""

from __future__ import annotations

import copy
import inspect
from importlib.util import find_spec

import pytest
from released_configurations import RELEASED
from rotary_modules import compare, modules

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (find_spec("transformers") and find_spec("torch")), reason="needs transformers, torch"
    ),
    # Files of transformers have invalid escapes in docstrings, and deprecate their own names.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.mark.parametrize("name", RELEASED)
def test_as_released(name):
    from transformers import CONFIG_MAPPING

    given = RELEASED[name]
    config = CONFIG_MAPPING[given["model_type"]].from_dict(copy.deepcopy(given)).get_text_config()
    fitting = [
        kind for _, kind in modules()
        if any(p.annotation in (type(config), "")
               for p in inspect.signature(kind.__init__).parameters.values())
    ]  # fmt: skip
    fitting = fitting or [
        kind for module, kind in modules() if module.__name__.split(".")[2] == given["model_type"]
        and "Vision" not in kind.__name__
    ]  # fmt: skip
    assert len(fitting) == 1, fitting
    compare(name, fitting[0](config), given)
