"""Sweeps: values of an option that are tried for every scheme, and the one that each keeps.

A study with ``sweep`` has two phases. First each scheme is trained once with every combination of
the values, with a seed of its own (or several), and scored at the training length on text or
examples that no result scores. Then the study runs with the values of the lowest loss. Selective
RoPE, arXiv 2511.17388, sweeps the learning rate of each encoding. Without that, one number of the
study favours some schemes.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from statistics import mean
from typing import Any

from posenc.contract.checks import nearest
from posenc.schemes.sizes import SIZES
from posenc.study.recipe import Recipe
from posenc.study.specs import Part, Plans, parse, sides

SEED = 1000  # of the tried runs, the first if there are several; no result has it
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the setting, where a sweep names no values
# Of a recipe. Its other numbers set the model, the budget or the scoring, equal for all schemes.
OPTIONS = (
    "learning_rate", "position_lr_scale", "weight_decay", "clip", "warmup", "random_positions",
)  # fmt: skip
_WHOLE = ("warmup", "random_positions")  # integers
_FORM = "accepted: name or name=value,value, with a name of the recipe or of a scheme, rope:base"
Values = Mapping[str, float]
PlansOf = Callable[[str, Recipe], Plans | None]
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    """An option that is varied: of the recipe, or of the scheme that it names.

    ``values`` are in ascending order; empty for ``FACTORS`` of the setting.
    """

    option: str
    scheme: str
    values: tuple[float, ...]

    @property
    def name(self) -> str:
        """``learning_rate``, or ``rope:base``."""
        return f"{self.scheme}:{self.option}" if self.scheme else self.option

    @classmethod
    def parse(cls, text: str) -> Axis:
        """The axis that ``learning-rate=3e-3,6e-3`` names."""
        name, equals, rest = text.strip().partition("=")
        scheme, _, option = name.strip().rpartition(":")
        option = option.strip().replace("-", "_")
        if not scheme and option not in OPTIONS:
            names = [each.replace("_", "-") for each in OPTIONS]
            if option in Recipe.__dataclass_fields__:
                raise ValueError(
                    f"sweep cannot vary {name!r}, which sets the model, the budget or the scoring, "
                    f"and so is equal for all schemes; accepted: {', '.join(names)}"
                )
            raise ValueError(f"sweep names {name!r}{nearest(name, names)}, or scheme:option")
        if not option:
            raise ValueError(f"sweep {text!r} has no option; {_FORM}")
        values = tuple(_number(text, each) for each in rest.split(",")) if equals else ()
        if equals and len(set(values)) < max(2, len(values)):
            raise ValueError(f"sweep {text!r} must name at least two values, each once")
        return cls(option, scheme.strip(), tuple(sorted(values)))

    def grid(self, label: str, recipe: Recipe, plans: Plans) -> tuple[float, ...]:
        """The values that are tried for a scheme; none where the option changes nothing."""
        setting = self.setting(label, recipe, plans)
        if setting is None:
            return ()
        if self.values:  # 1 as 1.0, for one run to have one name
            return tuple(map(float, self.values)) if isinstance(setting, float) else self.values
        if not setting:
            raise ValueError(
                f"sweep {self.name}: the setting is 0, so there are no factors of it to try; "
                f"name values, {self.name.replace('_', '-')}=0,1"
            )
        scaled = (setting * factor for factor in FACTORS)
        whole = isinstance(setting, int)
        return tuple(dict.fromkeys(max(1, round(v)) if whole else _tidy(v) for v in scaled))

    def setting(self, label: str, recipe: Recipe, plans: Plans) -> float | None:
        """The value without the sweep; None where the option changes nothing."""
        if self.scheme:
            part = _own_part(label, self.scheme)
            return None if part is None else self._of_scheme(plans.trained.schemes[0])
        learned = any(scheme.param_specs() for scheme in plans.trained.schemes)
        if self.option == "position_lr_scale" and not learned:
            return None
        value: float = getattr(recipe, self.option)
        return value if self.option in _WHOLE else float(value)

    def _of_scheme(self, scheme: Any) -> float:
        found = {f.name: getattr(scheme, f.name) for f in fields(scheme)} if _made(scheme) else {}
        numbers = {
            name: value
            for name, value in found.items()
            if name not in SIZES and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        if self.option not in numbers:
            hint = nearest(self.option, numbers)
            raise ValueError(f"sweep {self.name}: no numeric option {self.option!r}{hint}")
        return numbers[self.option]


@dataclass(frozen=True)
class Tuning:
    """What is tried for one scheme on one task: every combination of the values of its options.

    ``key`` is that of ``Study.recipes``. ``labels`` take the choice: those that are trained as
    ``trained``.
    """

    key: str
    trained: str
    labels: tuple[str, ...]
    grid: Mapping[str, tuple[float, ...]]
    setting: Values

    def combinations(self) -> Iterator[dict[str, float]]:
        """Every combination of values, by the name of the option."""
        for values in itertools.product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))


def axes_of(sweep: Iterable[str]) -> tuple[Axis, ...]:
    """The axes of an option ``sweep``; ``ValueError`` if one is named twice."""
    axes = tuple(map(Axis.parse, sweep))
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        raise ValueError(f"sweep must name each option once, got {names}")
    return axes


def tunings(
    axes: Sequence[Axis], recipes: Mapping[str, Recipe], labels: Sequence[str], plans: PlansOf
) -> tuple[Tuning, ...]:
    """What a study tries; ``ValueError`` for an option or a value that no scheme takes.

    Labels that are trained as one scheme, such as ``rope`` and ``rope~rope_yarn``, are tuned once.
    An option of a scheme is that of labels of this name alone.
    """
    found: dict[tuple[str, str, tuple[str, ...]], Tuning] = {}
    for key, recipe in recipes.items():
        for label in labels:
            trained, made = sides(label)[0], plans(label, recipe)
            if made is None:  # its run fails with this error, and so becomes a row
                continue
            own = {a: a.grid(label, recipe, made) for a in axes}
            grid = {axis.name: values for axis, values in own.items() if values}
            setting = {axis.name: axis.setting(label, recipe, made) or 0.0 for axis in own}
            setting = {name: setting[name] for name in grid}
            if grid:
                of = key, trained, tuple(grid)
                before = found[of].labels if of in found else ()
                found[of] = Tuning(key, trained, (*before, label), grid, setting)
    for axis in axes:
        if not any(axis.name in tuning.grid for tuning in found.values()):
            raise ValueError(_unused(axis, labels))
    for tuning in found.values():
        _check_values(tuning, recipes[tuning.key])
    return tuple(found.values())


def with_values(label: str, recipe: Recipe, values: Values) -> tuple[str, Recipe]:
    """The label and the recipe with these values in place of their own."""
    of_recipe: dict[str, Any] = {name: value for name, value in values.items() if ":" not in name}
    for name, value in values.items():
        scheme, _, option = name.rpartition(":")
        if scheme:
            label = _with_option(label, option, value)
    return label, replace(recipe, **of_recipe) if of_recipe else recipe


def by_combination(
    tuning: Tuning, records: Sequence[Record]
) -> Iterator[tuple[dict[str, float], Sequence[Record]]]:
    """Each combination, and the records of its seeds: equally many, one combination after another.

    ``ValueError`` for another number of records.
    """
    every = list(tuning.combinations())
    seeds, rest = divmod(len(records), len(every))
    if rest:
        raise ValueError(f"records must be of {len(every)} combinations each, got {len(records)}")
    for place, values in enumerate(every):
        yield values, records[place * seeds : (place + 1) * seeds]


def mean_loss(records: Sequence[Record]) -> float | None:
    """The mean validation loss over seeds; None if a seed has none: then the value is no choice."""
    if any(record["status"] != "ok" for record in records):
        return None
    return mean(float(record["validation"]["loss"]) for record in records)


def choose(tuning: Tuning, records: Sequence[Record]) -> dict[str, float]:
    """The values of the lowest mean validation loss, or none if no value trained.

    ``records`` are those of ``by_combination``. Of equal losses the setting wins, then the first.
    """
    ranked = [
        (loss, values != tuning.setting, place)
        for place, (values, own) in enumerate(by_combination(tuning, records))
        if (loss := mean_loss(own)) is not None
    ]
    return list(tuning.combinations())[min(ranked)[-1]] if ranked else {}


def edges(tuning: Tuning, chosen: Values) -> list[str]:
    """The options whose chosen value is the first or the last of its grid."""
    ends = {name: (min(values), max(values)) for name, values in tuning.grid.items()}
    return [name for name, value in chosen.items() if value in ends[name]]


def _check_values(tuning: Tuning, recipe: Recipe) -> None:
    for name, values in tuning.grid.items():
        for value in values:
            try:
                label, changed = with_values(tuning.trained, recipe, {name: value})
                Plans.of(label, changed)
            except (ValueError, TypeError) as error:
                raise ValueError(f"sweep {name}={value:g} of {tuning.trained!r}: {error}") from None


def _unused(axis: Axis, labels: Sequence[str]) -> str:
    if not axis.scheme:
        return f"sweep {axis.name}: no scheme of the study has learned position params"
    hint = nearest(axis.scheme, labels)
    return f"sweep {axis.name}: no scheme of the study is {axis.scheme!r} with its options{hint}"


def _own_part(label: str, name: str) -> Part | None:
    """The only part of a label, if it has this name: ``rope:base=5`` but not ``rope+alibi``."""
    if len(set(sides(label))) > 1:
        return None
    layers = parse(label)
    if len(layers) > 1 or len(layers[0].parts) > 1 or layers[0].parts[0].name != name:
        return None
    return layers[0].parts[0]


def _with_option(label: str, option: str, value: float) -> str:
    ((part,), window) = parse(label)[0].parts, parse(label)[0].window
    options = {**dict(part.options), option: value}
    written = ",".join(f"{name}={each!r}" for name, each in options.items())
    return f"{part.name}:{written}" + (f"@{window}" if window else "")


def _made(scheme: Any) -> bool:
    return is_dataclass(scheme) and not isinstance(scheme, type)


def _number(text: str, word: str) -> float:
    try:
        value = ast.literal_eval(word.strip())
    except (ValueError, SyntaxError):
        value = None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"sweep {text!r}: a value must be a number, got {word!r}; {_FORM}")
    return value


def _tidy(value: float) -> float:
    """Without the last digits of a product: .1 * 3 as .3."""
    return float(f"{value:.12g}")
