"""The benchmark suite's judgement on made-up ratios, its baselines, and one tiny run of its cases."""

from __future__ import annotations

import json

import pytest

from tests import ROOT

FACTS = {"cpu": "Intel(R) Xeon(R) Processor @ 2.50GHz", "threads": 2, "torch": "2.13.0"}

pytest.importorskip("pytest_benchmark")

pytestmark = pytest.mark.usefixtures("scripts")


def ratio(median, spread=0.04, rounds=100):
    """A ratio whose quartiles are `spread` of it apart; by default its standard error is 0.4 %."""
    from regressions import Ratio

    return Ratio(median, median * (1 - spread / 2), median * (1 + spread / 2), rounds)


def report(**cases):
    """What pytest-benchmark writes, as far as it is read, of cases with these ratios."""
    return {
        "machine_info": FACTS,
        "benchmarks": [
            {
                "name": f"test_{name}",
                "extra_info": vars(case),
                "stats": dict.fromkeys(("median", "q1", "q3", "rounds"), 1.0),
            }
            | {"options": {"seed": 1}}
            for name, case in cases.items()
        ],
    }


def test_ratio_is_of_pairs():
    """The machine is half as fast in the last round; the pair's ratio does not know."""
    from regressions import Ratio, summary

    found = summary([0.3, 0.3, 0.6], [0.2, 0.2, 0.4])
    assert found == {"median": 1.5, "q1": 1.5, "q3": 1.5, "rounds": 3}
    assert Ratio(**found).noise == 0
    assert summary([3.0], [2.0]) == {"median": 1.5, "q1": 1.5, "q3": 1.5, "rounds": 1}
    for samples, floors in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match=f"pairs, got {len(samples)} and {len(floors)}"):
            summary(samples, floors)


def test_noise_is_the_error_of_a_median():
    """Normal samples: quartiles are 1.349 deviations apart, a median errs by 1.2533 deviations / sqrt(n)."""
    assert ratio(2.0, spread=1.349, rounds=100).noise == pytest.approx(1.2533 / 10, rel=2e-3)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        pytest.param((1.5,), (1.64,), False, id="9 percent is allowed"),
        pytest.param((1.5,), (1.67,), True, id="11 percent is not"),
        pytest.param((1.5,), (0.9,), False, id="faster"),
        pytest.param((1.5, 0.4, 10), (1.9, 0.4, 10), False, id="27 percent in noise of 12 percent each"),
        pytest.param((1.5, 0.4, 400), (1.9, 0.4, 400), True, id="the same with more rounds"),
        pytest.param((1.5, 0.4, 10), (3.5, 0.4, 10), True, id="beyond any noise"),
        pytest.param(None, (1.5,), False, id="a new case"),
        pytest.param((1.5,), None, False, id="a case that is gone"),
    ],
)
def test_regressions_are_beyond_noise(before, now, expected):
    from regressions import Change

    change = Change("case", before and ratio(*before), now and ratio(*now))
    assert change.is_regression is expected


def test_only_what_is_slow_twice_counts():
    from regressions import compare, confirmed

    before = {name: ratio(1.0) for name in ("a", "b", "c")}
    changes = compare(before, {"a": ratio(1.3), "b": ratio(1.3), "new": ratio(9.0)})
    assert [change.name for change in changes] == ["a", "b", "new", "c"]
    changes = confirmed(changes, {"a": ratio(1.02), "b": ratio(1.4)})
    assert [change.name for change in changes if change.is_regression] == ["b"]
    assert [change.growth for change in changes] == [pytest.approx(0.02), pytest.approx(0.3), None, None]


def test_machines_of_one_kind_share_a_name():
    from regressions import differences, machine

    assert machine(FACTS) == "intel-xeon-2.50ghz-2-threads" != machine(FACTS | {"threads": 4})
    assert machine(FACTS | {"gpu": "NVIDIA H200"}) == "nvidia-h200"
    assert differences(FACTS, FACTS) == []
    assert differences(FACTS, FACTS | {"torch": "2.14.0"}) == ["torch: 2.13.0 before, 2.14.0 now"]


@pytest.fixture
def suite(monkeypatch, tmp_path):
    """The command with its own folders and reports instead of measurements, which it uses up."""
    import bench_suite

    reports, asked = [], []

    def measure(options, cases=None):
        asked.append(cases)
        return reports.pop(0)

    monkeypatch.setattr(bench_suite, "measure", measure)
    monkeypatch.setattr(bench_suite, "OWN", tmp_path)
    monkeypatch.setattr(bench_suite, "environment", lambda device: FACTS)
    bench_suite.reports, bench_suite.asked = reports, asked
    return bench_suite


def test_baseline_is_kept_and_compared_with(suite, tmp_path, capsys):
    suite.reports += [report(operator=ratio(1.4), model=ratio(9.0))]
    assert suite.main([]) == 0
    (kept,) = tmp_path.iterdir()
    assert kept.name == "suite-intel-xeon-2.50ghz-2-threads.json" and "seed" not in kept.read_text()
    capsys.readouterr()

    suite.reports += [report(operator=ratio(1.45), model=ratio(9.1))]
    assert suite.main(["--compare", "--baseline", str(kept)]) == 0
    assert "+3.6%" in capsys.readouterr().out

    suite.reports += [report(operator=ratio(2.0), model=ratio(9.1)), report(operator=ratio(1.9))]
    assert suite.main(["--compare", "--baseline", str(kept)]) == 1
    assert suite.asked == [None, None, None, ["operator"]]
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.endswith("SLOWER")] == ["operator"]
    assert json.loads(kept.read_text())["benchmarks"][0]["extra_info"]["median"] == 1.4

    suite.reports += [report(operator=ratio(2.0)), report(operator=ratio(1.41))]
    assert suite.main(["--compare", "--baseline", str(kept)]) == 0


def test_own_baseline_goes_first(tmp_path):
    from bench_suite import find_baseline

    own, committed = tmp_path / "own", tmp_path / "committed"
    for folder in (committed, own):
        assert find_baseline("here", (own, committed)) == (
            None if folder is committed else committed / "suite-here.json"
        )
        folder.mkdir()
        (folder / "suite-here.json").touch()
    assert find_baseline("here", (own, committed)) == own / "suite-here.json"
    assert find_baseline("elsewhere", (own, committed)) is None


def test_nothing_is_kept_of_a_failure(suite, tmp_path, capsys):
    suite.reports += [None]
    assert suite.main([]) == 2 and list(tmp_path.iterdir()) == []
    assert suite.main(["--compare", "--baseline", str(tmp_path / "none.json")]) == 2
    assert "no baseline" in capsys.readouterr().err and suite.asked == [None]


def test_committed_baselines_name_no_one():
    from regressions import machine, ratios

    found = list((ROOT / "benchmarks" / "results").glob("suite-*.json"))
    assert found
    for path in found:
        baseline = json.loads(path.read_text())
        assert path.stem == f"suite-{machine(baseline['machine_info'])}"
        assert ratios(baseline) and "node" not in baseline["machine_info"]


def test_tiny_run():
    from bench_suite import measure

    found = measure(["--tiny", "--seconds", "0.01", "-k", "operator and L128 and cpu or reference or generation"])
    names = {case["name"] for case in found["benchmarks"]}
    assert {"test_reference", "test_generation"} <= names
    for case in found["benchmarks"]:
        info = case["extra_info"]
        assert 0 < info["q1"] <= info["median"] <= info["q3"] and info["rounds"] == case["stats"]["rounds"] >= 5
    assert {"cpu", "threads", "torch"} <= found["machine_info"].keys() and "node" not in found["machine_info"]
