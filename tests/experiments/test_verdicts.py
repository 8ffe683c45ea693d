"""Verdicts on made-up rows: known differences, known intervals."""

import math

import pytest

from calgp.experiments import verdicts
from calgp.experiments.rows import Row, student


def row(method: str, *err: float, x: float | None = None, half: float | None = None, panel: str = "p", **more) -> Row:
    values = {"err": err} | more if err else more
    return Row(method, panel, x, values, {} if half is None else {"err": half})


def test_interval_of_seeds_is_students():
    # s = 0.01, n = 3: half = t₂ s / √3
    assert row("a", 0.10, 0.11, 0.12).half("err") == pytest.approx(4.303 * 0.01 / math.sqrt(3))


def test_interval_is_the_wider_of_seeds_and_test_set():
    assert row("a", 0.10, 0.11, 0.12, half=0.2).half("err") == 0.2
    assert row("a", 0.10, half=0.05).half("err") == 0.05
    assert row("a", 0.10).half("err") is None


def test_students_t_falls_to_the_normal_quantile():
    assert [student(n) for n in (0, 1, 10, 11)] == [math.inf, 12.706, 2.228, 1.96]


def test_difference_pools_the_variance_of_seeds():
    found, half = verdicts.difference(row("a", 0.1, 0.2), row("b", 0.5, 0.6), "err")  # type: ignore[misc]
    assert found == pytest.approx(-0.4)
    assert half == pytest.approx(4.303 * math.sqrt(0.005))  # pooled s² = 0.005, 1/2 + 1/2


def test_difference_of_single_seeds_has_the_chance_of_the_test_set():
    found, half = verdicts.difference(row("a", 0.1, half=0.03), row("b", 0.5, half=0.04), "err")  # type: ignore[misc]
    assert (found, half) == (pytest.approx(-0.4), pytest.approx(0.05))
    assert verdicts.difference(row("a", 0.1), row("b"), "err") is None


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
    judge = verdicts.among(lambda each: each.x != 0, verdicts.lower("a < b", ("a",), ("b",), ("err",)))
    assert judge([*clean, *corrupted]).state == "held"
    assert judge(clean).parts == ()


def test_of_many_comparisons_one_against_by_chance_refutes_nothing():
    """0.12 beyond 0.1 refutes a claim of one comparison; of forty it must be beyond 0.165."""
    half = 0.1 / math.sqrt(2)  # of each row: 0.1 of the difference
    good = [row(name, err, half=half, panel=str(p)) for p in range(39) for name, err in (("a", 0.1), ("b", 0.9))]

    def state(rows: list[Row], gap: float) -> str:
        bad = [row("a", 0.5 + gap, half=half, panel="bad"), row("b", 0.5, half=half, panel="bad")]
        return verdicts.lower("a < b", ("a",), ("b",), ("err",))([*rows, *bad]).state

    assert (state([], 0.12), state(good, 0.12), state(good, 0.17)) == ("not held", "undecided", "not held")


def test_a_comparison_says_what_is_compared_and_where():
    (part,) = verdicts.lower("a < b", ("a",), ("b",), ("err",))([row("a", 0.1, x=1e4), row("b", 0.5, x=1e4)]).parts
    assert part.what == "ERR of a − b (p, 10,000)"
    (part,) = verdicts.trend("falls", "err", -1)([row("a", 0.1, x=0.0), row("a", 0.5, x=5.0)]).parts
    assert part.what == "ERR of a, 5 − 0 (p)"


def test_comparisons_are_counted_where_they_were_made():
    errors = {"p": (0.1, 0.5), "q": (0.5, 0.1), "r": (0.3, 0.3)}
    rows = [
        row(name, err, half=0.01, panel=panel)
        for panel, both in errors.items()
        for name, err in zip("ab", both, strict=True)
    ]
    verdict = verdicts.lower("a < b", ("a",), ("b",), ("err",))(rows)
    assert [dict(verdict.count(panel)) for panel in "pqr"] == [{"held": 1}, {"not held": 1}, {"undecided": 1}]
    assert dict(verdict.count(metric="err")) == {"held": 1, "not held": 1, "undecided": 1}
    assert not verdict.count(metric="ece")


def test_what_was_not_run_is_undecided_and_says_so():
    verdict = verdicts.lower("a < b", ("a",), ("b",))([row("a", 0.1, 0.2), row("b")])
    assert (verdict.state, verdict.told, verdict.parts) == ("undecided", "not run", ())


def test_single_runs_without_intervals_decide_nothing():
    verdict = verdicts.lower("a < b", ("a",), ("b",), ("err",))([row("a", 0.1), row("b", 0.9)])
    assert verdict.state == "undecided"
    assert "no interval" in verdict.told


def test_one_comparison_against_a_claim_refutes_it():
    rows = [row("a", 0.1, 0.1, x=1), row("b", 0.5, 0.5, x=1), row("a", 0.5, 0.5, x=2), row("b", 0.1, 0.1, x=2)]
    verdict = verdicts.lower("a < b", ("a",), ("b",), ("err",))(rows)
    assert [part.state for part in verdict.parts] == ["held", "not held"]  # x is compared with the same x only
    assert verdict.state == "not held"
    assert "1 for it, 1 against, 0 undecided" in verdict.told
    assert "(p, 2): 0.4000" in verdict.told  # the comparison that is most against it


@pytest.mark.parametrize(
    ("other", "half", "state"),
    [(0.51, 0.01, "held"), (0.51, 0.2, "undecided"), (0.8, 0.01, "not held")],
)
def test_alike_is_a_fifth_of_the_larger(other, half, state):
    verdict = verdicts.alike("a = b", "a", "b", ("err",))([row("a", 0.5, half=half), row("b", other, half=half)])
    assert verdict.state == state


def test_alike_of_small_numbers_has_a_floor():
    verdict = verdicts.alike("a = b", "a", "b", ("err",))([row("a", 0.001, half=1e-4), row("b", 0.004, half=1e-4)])
    assert verdict.state == "held"


def test_alike_by_a_smaller_share():
    rows = [row("a", 0.99, half=0.001), row("b", 0.93, half=0.001)]
    states = [verdicts.alike("", "a", "b", ("err",), share=share)(rows).state for share in (0.2, 0.02)]
    assert states == ["held", "not held"]


def test_sign():
    rows = [row("a", gap=(-0.2, -0.21)), row("b", gap=(0.2, 0.21))]
    states = [verdicts.signed("", m, "gap", s)(rows).state for m, s in (("a", -1), ("a", 1), ("b", 1), ("b", -1))]
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
    rows = [row("a", 0.02, half=0.005)]
    states = [verdicts.below("", ("a",), "err", bound)(rows).state for bound in (0.04, 0.021, 0.001)]
    assert states == ["held", "undecided", "not held"]


def test_on_some_panels_alone():
    rows = [row("a", 0.1, 0.1, panel="p"), row("b", 0.9, 0.9, panel="p"), row("a", 0.9, 0.9, panel="q"),
            row("b", 0.1, 0.1, panel="q")]  # fmt: skip
    judge = verdicts.lower("a < b", ("a",), ("b",), ("err",))
    assert verdicts.on(("p",), judge)(rows).state == "held"
    assert judge(rows).state == "not held"
