"""Verdicts on made-up rows: known differences, known intervals."""

import math

import pytest

from calgp.paper import verdicts
from calgp.paper.rows import Row, difference


def row(method: str, *err: float, x: float | None = None, half: float | None = 0.0, panel: str = "p", **more) -> Row:
    """A row whose test images give intervals of ± half: none by default, so that seeds alone decide."""
    values = {"err": err} | more if err else more
    return Row(method, panel, x, values, {} if half is None else dict.fromkeys(values, half))


def test_difference_pools_the_variance_of_seeds():
    found = difference(row("a", 0.1, 0.2), row("b", 0.5, 0.6), "err")
    assert found is not None and found.value == pytest.approx(-0.4)
    assert found.half() == pytest.approx(4.302653 * math.sqrt(0.005))  # pooled s² = 0.005, 1/2 + 1/2


def test_difference_without_images_has_the_chance_of_both_test_sets():
    found = difference(row("a", 0.1, half=0.03), row("b", 0.5, half=0.04), "err")
    assert found is not None and (found.value, found.half()) == (pytest.approx(-0.4), pytest.approx(0.05))
    assert difference(row("a", 0.1), row("b"), "err") is None


def test_seeds_and_test_images_add_in_a_difference():
    """Neither alone reaches 0.4 here: half an interval of 0.3043 over seeds, 0.3 over images, 0.4273 together."""
    rows = [row("a", 0.1, 0.2, half=0.3 / math.sqrt(2)), row("b", 0.5, 0.6, half=0.3 / math.sqrt(2))]
    found = difference(rows[0], rows[1], "err")
    assert found is not None and found.half() == pytest.approx(math.hypot(0.304243, 0.3), rel=1e-4)
    assert verdicts.lower("a < b", ("a",), ("b",), ("err",))(rows).state == "undecided"


@pytest.mark.parametrize(
    ("a", "b", "state"),
    [((0.1, 0.11), (0.5, 0.51), "held"), ((0.5, 0.51), (0.1, 0.11), "not held"), ((0.1, 0.4), (0.2, 0.5), "undecided")],
)
def test_lower(a, b, state):
    verdict = verdicts.lower("a < b", ("a",), ("b",), ("err",))([row("a", *a), row("b", *b)])
    assert verdict.state == state


def test_among_judges_the_chosen_rows_only():
    """Clean images, on which b is better, say nothing about corrupted ones."""
    clean = [row("a", 0.5, 0.51, x=0.0), row("b", 0.1, 0.11, x=0.0)]
    corrupted = [row("a", 0.5, 0.51, x=1.0), row("b", 0.9, 0.91, x=1.0)]
    judge = verdicts.where(lambda each: each.x != 0, verdicts.lower("a < b", ("a",), ("b",), ("err",)))
    assert judge([*clean, *corrupted]).state == "held"
    assert judge(clean).parts == ()


def test_of_many_comparisons_one_against_by_chance_refutes_nothing():
    """0.12 beyond 0.1 refutes a claim of one comparison; of forty it must be beyond 0.165."""
    half = 0.1 / math.sqrt(2)  # of each row: 0.1 of the difference
    good = [row(name, err, err, half=half, panel=str(p)) for p in range(39) for name, err in (("a", 0.1), ("b", 0.9))]

    def state(rows: list[Row], gap: float) -> str:
        bad = [row("a", *2 * [0.5 + gap], half=half, panel="bad"), row("b", 0.5, 0.5, half=half, panel="bad")]
        return verdicts.lower("a < b", ("a",), ("b",), ("err",))([*rows, *bad]).state

    assert (state([], 0.12), state(good, 0.12), state(good, 0.17)) == ("not held", "held", "mixed")


@pytest.mark.parametrize(
    ("hold", "against", "undecided", "one_seed", "state"),
    [
        (0, 0, 0, 0, "not run"),
        (0, 0, 0, 4, "one seed"),
        (3, 0, 1, 0, "held"),
        (2, 0, 2, 0, "held"),
        (1, 0, 2, 0, "undecided"),
        (0, 1, 0, 0, "not held"),
        (0, 1, 5, 0, "undecided"),  # one against of many does not make it false
        (9, 1, 0, 0, "mixed"),
        (1, 9, 0, 0, "not held"),
        (1, 2, 9, 0, "mixed"),
        (1, 0, 0, 9, "undecided"),  # what was repeated is not enough
    ],
)
def test_the_verdict_goes_by_shares(hold, against, undecided, one_seed, state):
    cases = {"hold": (0.1, 0.1), "against": (0.9, 0.9), "undecided": (0.1, 0.9), "one_seed": (0.1,)}
    counts = {"hold": hold, "against": against, "undecided": undecided, "one_seed": one_seed}
    rows = []
    for name, count in counts.items():
        for place in range(count):
            other = (0.5,) * len(cases[name])
            panel = f"{name} {place}"
            rows += [row("a", *cases[name], half=1e-3, panel=panel), row("b", *other, half=1e-3, panel=panel)]
    verdict = verdicts.lower("a < b", ("a",), ("b",), ("err",))(rows)
    assert verdict.state == state
    assert verdict.count() == {
        name: count
        for name, count in zip(("held", "not held", "undecided", "one seed"), counts.values(), strict=True)
        if count
    }


def test_one_seed_against_one_seed_is_indicative_and_never_decides():
    """However far apart: the chance of training is unknown."""
    verdict = verdicts.lower("a < b", ("a",), ("b",), ("err",))([row("a", 0.9, half=1e-6), row("b", 0.1, half=1e-6)])
    (part,) = verdict.parts
    assert (verdict.state, part.state, part.leaning) == ("one seed", "one seed", "against")
    assert part.interval == (pytest.approx(0.8, abs=1e-5), pytest.approx(0.8, abs=1e-5))
    assert verdicts.SAYS[verdict.state] == "one seed: indicative"
    rows = [row("a", 0.9, half=1e-6)]
    assert verdicts.below("", ("a",), "err", 0.1)(rows).state == "one seed"


def test_one_seed_against_two_is_judged_by_the_seeds_that_were_repeated():
    judge = verdicts.lower("a < b", ("a",), ("b",), ("err",))
    assert judge([row("a", 0.1), row("b", 0.9, 0.91)]).state == "held"
    assert judge([row("a", 0.1), row("b", 0.5, 0.9)]).state == "undecided"


def test_a_comparison_says_what_is_compared_and_where():
    (part,) = verdicts.lower("a < b", ("a",), ("b",), ("err",))([row("a", 0.1, x=1e4), row("b", 0.5, x=1e4)]).parts
    assert part.what == "ERR of a − b (p, 10,000)"
    (part,) = verdicts.trend("falls", "err", -1)([row("a", 0.1, x=0.0), row("a", 0.5, x=5.0)]).parts
    assert part.what == "ERR of a, 5 − 0 (p)"


def test_comparisons_are_counted_where_they_were_made():
    errors = {"p": (0.1, 0.5), "q": (0.5, 0.1), "r": (0.3, 0.3)}
    rows = [
        row(name, err, err, half=0.01, panel=panel)
        for panel, both in errors.items()
        for name, err in zip("ab", both, strict=True)
    ]
    verdict = verdicts.lower("a < b", ("a",), ("b",), ("err",))(rows)
    assert [dict(verdict.count(panel)) for panel in "pqr"] == [{"held": 1}, {"not held": 1}, {"undecided": 1}]
    assert dict(verdict.count(metric="err")) == {"held": 1, "not held": 1, "undecided": 1}
    assert not verdict.count(metric="ece")


def test_what_was_not_run_is_undecided_and_says_so():
    verdict = verdicts.lower("a < b", ("a",), ("b",))([row("a", 0.1, 0.2), row("b")])
    assert (verdict.state, verdict.summary, verdict.parts) == ("not run", "not run", ())


def test_runs_whose_chance_of_test_images_is_unknown_decide_nothing():
    rows = [row("a", 0.1, 0.1, half=None), row("b", 0.9, 0.9, half=None)]
    verdict = verdicts.lower("a < b", ("a",), ("b",), ("err",))(rows)
    assert verdict.state == "undecided"
    assert "no interval" in verdict.summary


def test_comparisons_on_both_sides_are_mixed():
    rows = [row("a", 0.1, 0.1, x=1), row("b", 0.5, 0.5, x=1), row("a", 0.5, 0.5, x=2), row("b", 0.1, 0.1, x=2)]
    verdict = verdicts.lower("a < b", ("a",), ("b",), ("err",))(rows)
    assert [part.state for part in verdict.parts] == ["held", "not held"]  # x is compared with the same x only
    assert verdict.state == "mixed"
    assert "1 for it, 1 against, 0 undecided" in verdict.summary
    assert "(p, 2): 0.4000" in verdict.summary  # the comparison that is most against it


@pytest.mark.parametrize(
    ("other", "half", "state"),
    [(0.51, 0.01, "held"), (0.51, 0.2, "undecided"), (0.8, 0.01, "not held")],
)
def test_alike_is_a_fifth_of_the_larger(other, half, state):
    verdict = verdicts.alike("a = b", "a", "b", ("err",))(
        [row("a", 0.5, 0.5, half=half), row("b", other, other, half=half)]
    )
    assert verdict.state == state


def test_alike_of_small_numbers_has_a_floor():
    verdict = verdicts.alike("a = b", "a", "b", ("err",))(
        [row("a", 0.001, 0.001, half=1e-4), row("b", 0.004, 0.004, half=1e-4)]
    )
    assert verdict.state == "held"


def test_alike_by_a_smaller_share():
    rows = [row("a", 0.99, 0.99, half=0.001), row("b", 0.93, 0.93, half=0.001)]
    states = [verdicts.alike("", "a", "b", ("err",), share=share)(rows).state for share in (0.2, 0.02)]
    assert states == ["held", "not held"]


def test_sign():
    rows = [row("a", gap=(-0.2, -0.21)), row("b", gap=(0.2, 0.21))]
    sides = (("a", verdicts.below), ("a", verdicts.above), ("b", verdicts.above), ("b", verdicts.below))
    states = [judge("", (method,), "gap", 0.0)(rows).state for method, judge in sides]
    assert states == ["held", "not held", "held", "not held"]


def test_trend_is_from_the_least_to_the_largest_x():
    rows = [row("a", 0.3, 0.3, x=3), row("a", 0.9, 0.9, x=1), row("a", 1.0, 1.0, x=2)]
    assert verdicts.trend("falls", "err", -1)(rows).state == "held"
    assert verdicts.trend("rises", "err", 1)(rows).state == "not held"
    assert verdicts.trend("falls", "err", -1)(rows[:1]).parts == ()


def test_exceeds_compares_seed_by_seed():
    rows = [row("a", more=(1.0, 2.0), less=(0.5, 1.5))]  # the seeds differ by much, the gap by nothing
    assert verdicts.exceeds("", ("a",), "more", "less")(rows).state == "held"
    assert verdicts.exceeds("", ("a",), "less", "more")(rows).state == "not held"


def test_below_a_bound():
    rows = [row("a", 0.02, 0.02, half=0.005)]
    states = [verdicts.below("", ("a",), "err", bound)(rows).state for bound in (0.04, 0.021, 0.001)]
    assert states == ["held", "undecided", "not held"]
    states = [verdicts.above("", ("a",), "err", bound)(rows).state for bound in (0.04, 0.021, 0.001)]
    assert states == ["not held", "undecided", "held"]


def test_a_method_may_be_compared_between_panels():
    rows = [row("a", 0.1, 0.1, panel="p"), row("a", 0.9, 0.9, panel="q"), row("b", 0.0, 0.0, panel="q")]
    (part,) = verdicts.between_panels("", "a", "err", less="p", more="q")(rows).parts
    assert (part.state, part.what) == ("held", "ERR of a, p − q")
    assert verdicts.between_panels("", "a", "err", less="q", more="p")(rows).state == "not held"


def test_on_some_panels_alone():
    rows = [row("a", 0.1, 0.1, panel="p"), row("b", 0.9, 0.9, panel="p"), row("a", 0.9, 0.9, panel="q"),
            row("b", 0.1, 0.1, panel="q")]  # fmt: skip
    judge = verdicts.lower("a < b", ("a",), ("b",), ("err",))
    assert verdicts.on(("p",), judge)(rows).state == "held"
    assert judge(rows).state == "mixed"
