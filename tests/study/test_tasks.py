"""What every task keeps, and the answers of each by a solver that reads words."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import numpy as np
import pytest

from posenc.cli.pages import docstring_texts, title_of
from posenc.makers import make
from posenc.study import NO_ANSWER, Recipe, Study
from posenc.study.key_bytes import CONTEXT, key_bytes
from posenc.study.tasks import catalogue
from posenc.study.tasks.assignments import lay_out
from posenc.study.tasks.catalogue import ALL, TEXT, expand, make_task

OTHERS = ("mqar:tokens_per_pair=2", "repeat_copy:symbols=8", "passkey:symbols=3,shared=True")
LABELS = [label for label in (*expand([ALL]), *OTHERS) if label != TEXT]  # its data are files
every_task = pytest.mark.parametrize("label", LABELS)


def sizes(task):
    """The least size and those after it, and sizes of training and of tests."""
    usual = task.defaults()["train_len"]
    for size in sorted({*range(task.least_size, task.least_size + 4), usual, 2 * usual}):
        try:
            task.check_size(size)
        except ValueError:
            continue
        yield size


def draw(task, size, count=8, seed=0):
    return task.draw(np.random.default_rng(seed), size, count)


# Solvers: from the words read so far, the answer at the last one.


def prompt(answer):
    def solve(words, task):
        if ":" in words:
            at = words.index(":")
            return [*answer(words[1:at]), "#"][len(words) - at - 1]
        return None

    return solve


def association(words, task):
    facts = (re.fullmatch(r"p(\d+)=(v\d+)", word) for word in words)
    towns = {f"town{int(fact[1]) % task.towns}?": fact[2] for fact in facts if fact}
    return towns.get(words[-1])


def flip_flop(words, task):
    pairs = zip(words[::2], words[1::2], strict=False)
    return [bit for what, bit in pairs if what == "write"][-1] if words[-1] == "read" else None


def frequent_words(words, task):
    counts = Counter(word for word in words if word != "most?").most_common()
    return counts[0][0] if words[-1] == "most?" else None


def indirect_indexing(words, task):
    if asked := re.fullmatch(r"(c\d+)([+-]\d+)\?", words[-1]):
        return words[words.index(asked[1]) + int(asked[2])]
    return None


def last_value(words, task):
    written = [word.split("=") for word in words if "=" in word]
    return dict(written).get(words[-1].rstrip("?"))


def majority(words, task):
    ahead = words.count("1") - words.count("0")
    return "ones" if ahead > 0 else "zeros" if ahead < 0 else "tie"


def mqar(words, task):
    if task.tokens_per_pair == 1:
        return last_value(words, task)
    return words[words.index(words[-1]) + 1]


def parity(words, task):
    return str(words.count("1") % 2)


def passkey(words, task):
    mark, *again = (n for n, word in enumerate(words) if word == "?")
    return words[mark + 1 + len(words) - 1 - again[0]]


def state_tracking(words, task):
    state = "012"[: task.things]
    for word in words[1:]:
        state = "".join(state[int(n)] for n in word)
    return state


def variable_tracking(words, task):
    given = dict(word.split("=") for word in words if "=" in word)
    found = words[-1].rstrip("?")
    for _ in range(task.links + 1):
        found = given.get(found, found)
    return found


SOLVERS = {
    "association": association,
    "copy": prompt(lambda x: x),
    "flip_flop": flip_flop,
    "frequent_words": frequent_words,
    "indirect_indexing": indirect_indexing,
    "last_value": last_value,
    "majority": majority,
    "mqar": mqar,
    "parity": parity,
    "passkey": passkey,
    "repeat_copy": prompt(lambda x: x),
    "reverse": prompt(lambda x: x[::-1]),
    "sort": prompt(lambda x: sorted(x, key=int)),
    "state_tracking": state_tracking,
    "variable_tracking": variable_tracking,
}


def test_every_task_has_a_solver():
    assert {*SOLVERS, TEXT} == set(catalogue._BUILT_IN)


@every_task
def test_answers_follow_from_what_is_read_so_far(label):
    task, solve = make_task(label), SOLVERS[label.partition(":")[0]]
    for size in sizes(task):
        for tokens, labels in zip(*draw(task, size)[:2], strict=True):
            words = [task.word(int(token)) for token in tokens]
            for t in np.flatnonzero(labels != NO_ANSWER):
                assert solve(words[: t + 1], task) == task.word(int(labels[t])), (words, t)


@every_task
def test_shapes_and_ranges(label):
    task = make_task(label)
    for size in sizes(task):
        tokens, labels, groups = draw(task, size)
        assert tokens.shape == labels.shape == (8, task.tokens(size))
        assert tokens.dtype.kind == labels.dtype.kind == "i"
        assert 0 <= tokens.min() <= tokens.max() < task.vocabulary
        assert NO_ANSWER <= labels.min() <= labels.max() < task.vocabulary
        assert (labels != NO_ANSWER).any(axis=1).all()
        assert (groups is not None) == bool(task.groups) == bool(task.group_names())
        if groups is not None:
            of_answers = groups[labels != NO_ANSWER]
            assert 0 <= of_answers.min() <= of_answers.max() < len(task.group_names())


@every_task
def test_examples_follow_from_the_generator(label):
    task = make_task(label)
    size = max(sizes(task))
    one, same, other = (draw(task, size, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True) if a is not None)
    assert not np.array_equal(one.tokens, other.tokens)


@every_task
def test_words_tell_tokens_apart(label):
    task = make_task(label)
    words = [task.word(token) for token in range(task.vocabulary)]
    told = [word for word in words if word != "."]  # noise, which has no meaning
    assert len(set(told)) == len(told)
    assert all(re.fullmatch(r"\S+", word) for word in words)
    read = draw(task, max(sizes(task))).tokens
    assert any(words[token] in told for token in read.ravel())


@every_task
def test_facts(label):
    task, recipe = make_task(label), Recipe(task=label)  # which checks each length of evaluation
    settings = task.defaults()
    assert recipe.eval_lens == tuple(settings["train_len"] * n for n in settings["multiples"])
    assert recipe.eval_lens[0] == recipe.train_len
    assert task.paper in (type(task).__doc__ or "")
    assert title_of(type(task)).endswith((".", ":"))
    assert set(task.options()) <= docstring_texts(type(task)).keys()
    assert 0 <= task.chance < task.solved_at <= 1
    assert {task.score, task.solved_by} <= {"token_accuracy", "exact_match"}
    assert task.tests()[""] == task


@every_task
def test_batches_follow_from_the_seed_alone(label):
    task = make_task(label)
    alibi, rope = Study(task=label, schemes=("alibi", "rope"), seeds=1).runs(None, "jax")
    drawn = [task.training(run, 1, 50, 2) for run in (alibi, rope, Recipe(task=label, dim=32))]
    assert drawn[0].tokens.shape == (2, alibi.batch_size, alibi.train_tokens)
    for other in drawn[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(drawn[0][:2], other[:2], strict=True))
    for seed, first in ((2, 50), (1, 100)):
        assert not np.array_equal(drawn[0].tokens, task.training(alibi, seed, first, 2).tokens)


@every_task
def test_training_has_all_sizes_if_varied_and_pads_without_answers(label):
    task, recipe = make_task(label), Recipe(task=label)
    batch = task.in_domain(recipe, 0)
    assert (batch.labels != NO_ANSWER).any(axis=1).all()
    width = batch.tokens.shape[1]
    ends = width - (batch.labels[:, ::-1] != NO_ANSWER).argmax(axis=1)
    lengths = {task.tokens(size) for size in range(task.least_size, recipe.train_len + 1)}
    if task.varied:
        assert set(ends) == lengths
        assert not batch.tokens[np.arange(width) >= ends[:, None]].any()
    else:
        assert width == task.tokens(recipe.train_len)


def scored(task, recipe, right=True):
    """What a model is asked in tests, and the scores of one that is always right, or never."""
    asked = []

    def answer(tokens, labels, window):
        asked.append((tokens, labels))
        return np.zeros(labels.shape), np.full(labels.shape, right)

    return asked, task.scores(recipe, 0, answer, False)["scores"]


@every_task
def test_scores(label):
    task, recipe = make_task(label), Recipe(task=label, eval_windows=16)
    (asked, best), (again, worst) = scored(task, recipe), scored(task, recipe, right=False)
    assert all(np.array_equal(a, b) for a, b in zip(asked[0], again[0], strict=True))
    keys = [(test, str(size)) for test in task.tests() for size in recipe.eval_lens]
    assert [(test, size) for test, of_sizes in best.items() for size in of_sizes] == keys
    for (test, size), (_, labels) in zip(keys, asked, strict=True):
        found, none = best[test][size], worst[test][size]
        assert found["token_accuracy"] == found["exact_match"] == 1
        assert none["token_accuracy"] == none["exact_match"] == 0
        assert found["right"] == found["asked"] == (labels != NO_ANSWER).sum(axis=1).tolist()
        if "groups" in found:
            assert np.sum(found["groups"], axis=0).tolist() == [sum(found["asked"])] * 2
        early = labels[:, : task.tokens(recipe.train_len)] != NO_ANSWER
        if int(size) > recipe.train_len:
            assert not (task.running and early.any())


@every_task
def test_tests_are_no_training(label):
    task, recipe = make_task(label), Recipe(task=label, eval_windows=64, batch_size=64)
    trained = task.training(recipe, 0, 0, 1).tokens[0]
    fresh = task.in_domain(recipe, 0).tokens
    of_tests = scored(task, recipe)[0][0][0]
    for one, other in itertools.combinations((trained, fresh, of_tests), 2):
        assert not np.array_equal(one, other)
        alike = [np.array_equal(a, b) for a, b in zip(one, other, strict=True)]
        assert np.mean(alike) < 0.2  # some of very short examples


def is_uniform(found, places):
    """A chi-square has mean ``df`` and deviation ``sqrt(2 df)``; five of these are never seen."""
    counts = np.bincount(found, minlength=places)
    statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    return len(counts) == places and statistic < places - 1 + 5 * np.sqrt(2 * (places - 1))


@pytest.mark.parametrize("label", ["passkey", "passkey:shared=True"])
def test_a_passkey_is_anywhere(label):
    tokens, _, groups = draw(make_task(label), 42, 8000)
    start = (tokens == 0).argmax(axis=1)
    assert is_uniform(start, 40)
    assert is_uniform(groups[:, -1], 10)


def test_assignments_are_anywhere_and_all_are_asked_for():
    places, asked, which = lay_out(np.random.default_rng(0), 8000, 32, 6, 0.3)
    assert is_uniform(places.ravel(), 24)
    assert is_uniform(which[:, -1], 6)
    assert asked[:, -1].all()
    assert not np.take_along_axis(asked, places, axis=1).any()
    known = (np.arange(32) > places[:, :, None]).sum(axis=1)
    assert (which < known)[asked].all()
    assert (np.diff(places) > 0).all()


def test_prompts_have_each_symbol_anywhere():
    tokens = draw(make_task("copy:symbols=12"), 12, 4000).tokens
    assert is_uniform((tokens[:, 1:13] == 2).argmax(axis=1), 12)


def test_what_must_fail():
    sizes = {"num_heads": 2, "head_dim": 8, "hidden_dim": 16, "max_len": 16, "train_len": 16}
    fixed, of_content = (
        [make(name, **sizes) for name in names]
        for names in (("rope", "alibi", "learned", "nope"), ("fox", "cope", "selective_rope"))
    )
    assert all(make_task("parity").must_fail(scheme) for scheme in fixed)
    assert not any(make_task("parity").must_fail(scheme) for scheme in of_content)
    for label in LABELS:
        never = label.partition(",")[0] not in ("parity", "repeat_copy")
        assert never != all(make_task(label).must_fail(scheme) for scheme in fixed)


@pytest.mark.parametrize("near", [3, 12, 40])
def test_key_bytes_follow_from_far_repeats_alone(near):
    rng = np.random.default_rng(near)
    text = rng.integers(0, 2, (6, 90), np.uint8)
    text[3:, 50:70] = text[3:, 5:25]  # a repeat at 45
    expected = np.zeros((6, 89), bool)
    for row, t in np.ndindex(6, 90):
        seen, whole = bytes(text[row]), CONTEXT + 1
        repeats = (
            n for n in range(CONTEXT, t) if seen[: n + 1].endswith(seen[t + 1 - whole : t + 1])
        )
        nearest = t - max(repeats, default=t)
        expected[row, t - 1] = t >= CONTEXT and nearest > near
    found = key_bytes(text, near)
    assert expected.any()
    assert np.array_equal(found, expected)
    assert not key_bytes(text[:, : CONTEXT + 1], near).any()
