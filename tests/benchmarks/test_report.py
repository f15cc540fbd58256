"""Products of results files: pictures, and the share of the limit."""

import json
import re

import pytest

from tests import ROOT

pytestmark = pytest.mark.usefixtures("scripts")


def test_picture(tmp_path, environment):
    pytest.importorskip("matplotlib")
    from report import main

    rows = [
        {"section": "core", "implementation": "SDPA + bias", "direction": "forward", "length": length, "batch": 1}
        | {"median_ms": length / 8, "peak_bytes": length * 1000}
        for length in (64, 128)
    ]
    settings = {"heads": 2, "head_dim": 16, "dtype": "float32"}
    source = tmp_path / "results.json"
    source.write_text(json.dumps({"rows": rows, "settings": settings, "environment": environment}))
    assert main(["--plot", str(source)]) == 0
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    source.write_text(json.dumps({"rows": [], "settings": settings, "environment": environment}))
    assert main(["--plot", str(source)]) == 1


@pytest.mark.parametrize(
    ("name", "labels"),
    {
        "speech-epyc-avx512-2-cores": ["length (frames, audio)", "125", "10 s"],
        "model-epyc-avx512-2-cores": ["85 targets", "512 tokens"],
        "recurrence-xeon-amx-2-cores": ["numbers at the points: speed over that of a sliding window"],
        "objectives-xeon-amx-2-cores": ["Intel(R) Xeon(R) Processor, 1 thread, torch 2.13.0+cpu"],
        "precision-permutation-epyc-2-cores": ["0.5 %"],
        "epyc-avx512-2-cores": ["forward and backward", "0.1", "1,000", "100 %"],
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_labels_of_committed_pictures(tmp_path, name, labels):
    """A reader needs neither this package's abbreviations nor powers of ten."""
    pytest.importorskip("matplotlib")
    from report import main

    picture = tmp_path / "picture.svg"  # has its texts in comments
    assert main(["--plot", str(ROOT / f"benchmarks/results/{name}.json"), str(picture)]) == 0
    found = re.findall(r"<!-- (.*?) -->", picture.read_text())
    assert not set(labels) - set(found)
    assert not [text for text in found if re.search(r"\b1 threads|mathdefault|fwd|\d x \d", text)]


def test_share_of_the_limit(tmp_path, environment):
    """Three products forward in 1.5 times the time of two are made as fast as those; the picture gets a third row."""
    pytest.importorskip("matplotlib")
    from lib.plot import limit_share, plot

    row = {"section": "core", "implementation": "xlnet_kernels cpu", "direction": "forward", "length": 64, "batch": 1}
    row |= {"median_ms": 3.0, "peak_bytes": 1000, "ratio_to_baseline": 1.5}
    assert limit_share(row) == {"limit_share": 1}
    assert limit_share(row | {"ratio_to_baseline": 1.2}) == {"limit_share": pytest.approx(1.25)}
    assert limit_share(row | {"direction": "backward"}) == {"limit_share": pytest.approx(11 / 7 / 1.5)}
    assert limit_share(row | {"implementation": "plain SDPA, no positions"}) == {}
    assert limit_share({name: row[name] for name in row if name != "ratio_to_baseline"}) == {}

    heights = []
    settings = {"heads": 2, "head_dim": 16, "dtype": "float32"}
    for rows in ([row], [{name: row[name] for name in row if name != "ratio_to_baseline"}]):
        plot({"rows": rows, "settings": settings, "environment": environment}, tmp_path / "picture.png")
        # width and height are words 4 and 5 of a PNG
        heights.append(int.from_bytes((tmp_path / "picture.png").read_bytes()[20:24], "big"))
    assert heights == [1500, 1050]


def test_counts_of_windows(tmp_path, capsys):
    """One line for each kind of window and direction; a longer sequence has what it costs a key beside the shorter."""
    from report import main

    row = {"case": "documents", "direction": "forward", "architecture": 80}
    rows = [
        row | {"length": 32768, "bound_cycles": 1000000, "growth": None},
        row | {"length": 65536, "bound_cycles": 2200000, "growth": 1.1},
    ]
    source = tmp_path / "results.json"
    source.write_text(json.dumps({"triton": "3.9.0", "window": 512, "rows": rows}))
    assert main([str(source)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| 512 keys by | direction | sm_80, L 32768 | sm_80, L 65536 |"
    assert lines[2] == "| documents | forward | 1.0 | 2.2, 1.100x a key |"


def test_committed_results_are_short():
    """Rows are lines, samples are quartiles, and each file has tables or is on a page or in a test."""
    from lib.report import markdown

    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    committed = [file for file in files if not re.match(r"\w+-(cpu|cuda)-\w+\.json", file.name)]  # not what runs leave
    assert sum(len(file.read_text().splitlines()) for file in committed) < 10_000
    readers = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "tests").rglob("*.py")]
    text = "\n".join(file.read_text() for file in readers)
    for file in committed:
        run = json.loads(file.read_text())
        assert ("curves" not in run and "\n|" in markdown(run)) or file.stem in text, file.name


def test_summary_needs_the_three_lines_that_it_shows(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from report import main

    source = ROOT / "benchmarks/results/epyc-avx512-2-cores.json"
    picture = tmp_path / "picture.svg"
    assert main(["--summary", str(source), str(picture)]) == 0
    found = re.findall(r"<!-- (.*?) -->", picture.read_text())
    assert {"xlnet_kernels", "transformers", "plain attention", "time, ms", "2048"} <= set(found)
    results = json.loads(source.read_text())
    results["rows"] = [row for row in results["rows"] if row["implementation"] != "transformers eager"]
    (tmp_path / "part.json").write_text(json.dumps(results))
    assert main(["--summary", str(tmp_path / "part.json")]) == 1
    assert "one of this package, transformers and plain SDPA has no times" in capsys.readouterr().err


def run_of_models(*rows):
    defaults = dict(section="model", case="8 targets, 48 x 1", direction="forward", peak_bytes=2e6, status="ok")
    return {"rows": [defaults | row for row in rows]}


def test_speedups_are_against_the_fastest_peer(tmp_path):
    from report import main

    rows = (
        dict(implementation="xlnet_kernels", median_ms=2.0, check={"passed": True}),
        dict(implementation="xlnet_kernels, medium", median_ms=1.0),
        dict(implementation="transformers eager", median_ms=9.0),
        dict(implementation="transformers sdpa", median_ms=5.0, peak_bytes=7e6),
        dict(implementation="xlnet_kernels", direction="backward", median_ms=200.0),
        dict(implementation="transformers eager", direction="backward", status="skipped"),
    )
    sources, page = [tmp_path / "model-a-2-cores.json", tmp_path / "other.json"], tmp_path / "page.md"
    sources[0].write_text(json.dumps(run_of_models(*rows)))
    sources[1].write_text(json.dumps(run_of_models(rows[0] | {"section": "speech", "case": "10 s"})))
    page.write_text("<!-- speedups model-a-2-cores.json other.json -->\n<!-- end -->\n")
    assert main(["--speedups", *map(str, sources), str(page)]) == 0
    found = [line[2:-2].split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")][2:]
    assert found == [
        ["model-a", "8 targets, 48 x 1", "forward", "2.00", "transformers sdpa", "5.00", "2.50", "2", "7"],
        ["model-a", "8 targets, 48 x 1, medium", "forward", "1.00", "transformers sdpa", "5.00", "5.00", "2", "7"],
        ["model-a", "8 targets, 48 x 1", "training step", "200", "-", "-", "-", "2", "-"],
        ["other", "attention, 10 s", "forward", "2.00", "-", "-", "-", "2", "-"],
    ]


def test_speedups_of_wrong_results_are_refused(tmp_path, capsys):
    from report import main

    source = tmp_path / "wrong.json"
    row = dict(implementation="xlnet_kernels", median_ms=2.0, check={"passed": False})
    source.write_text(json.dumps(run_of_models(row)))
    assert main(["--speedups", str(source)]) == 1
    assert "xlnet_kernels is wrong in 8 targets, 48 x 1" in capsys.readouterr().err


def test_a_page_of_all_tables_needs_a_page(tmp_path, capsys):
    from report import main

    source, page = ROOT / "benchmarks/results/host-time.json", tmp_path / "tables.md"
    assert main(["--page", str(source), str(page)]) == 0
    assert page.read_text().startswith("# Tables of all results\n\n## host-time\n\n| problem | what | direction |")
    with pytest.raises(SystemExit):
        main(["--page", str(source)])
    assert "--page takes results files and a page" in capsys.readouterr().err
