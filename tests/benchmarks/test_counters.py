"""benchmarks/counters.py without a GPU: what ncu is asked, and what is made of tables in its form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("scripts", "one_thread")

NAMES = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size")
HEADER = ",".join(f'"{name}"' for name in NAMES)
METRICS = {
    "gpu__time_duration.sum": "us",
    "launch__registers_per_thread": "register/thread",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "%",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "%",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "%",
    "smsp__issue_active.avg.pct_of_peak_sustained_elapsed": "%",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "%",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "inst",
    "smsp__average_warps_issue_stalled_long_scoreboard_not_issued_per_issue_active.ratio": "inst",
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": "inst",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": "inst",
}
FORWARD = "void xk::(anonymous namespace)::forward_kernel<c10::BFloat16, (int)64>(xk::Arguments)"


def line(number: int, kernel: str, *values: str) -> str:
    head = [str(number), "77", "python3.12", "a-host", kernel, "1", "7", "(128, 1, 1)", "(4, 1, 1)"]
    return ",".join(f'"{cell}"' for cell in (*head, *values))


WIDE = "\n".join(
    [
        "==PROF== Connected to process 77 (/somewhere/python3.12)",
        "==PROF== Disconnected from process 77",
        HEADER + "".join(f',"{name}"' for name in METRICS),
        ",".join(['""'] * len(NAMES) + [f'"{unit}"' for unit in METRICS.values()]),
        line(0, FORWARD, "1,250.5", "168", "25", "71.5", "80", "40", "n/a", "1.5", "9", "1", "2.5"),
        line(1, "rows_kernel", "2", "255", "25", "30", "44", "50", "20", "1.5", "9", "1", "2.5"),
        line(2, "void at::native::fill<float>(int)", "1000", "32", "90", "0", "0", "10", "90.5", "1", "1", "1", "1"),
    ]
)
LONG = "\n".join(
    [
        HEADER + ',"Section Name","Metric Name","Metric Unit","Metric Value"',
        line(0, FORWARD, "Command line profiler metrics", "gpu__time_duration.sum", "nsecond", "1,250,500"),
        line(0, FORWARD, "Occupancy", "launch__registers_per_thread", "register/thread", "168"),
    ]
)


@pytest.fixture
def no_ncu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


def test_counters_come_from_what_ncu_writes(tmp_path, capsys):
    import counters

    source, output = tmp_path / "ncu.csv", tmp_path / "new" / "counters.json"
    source.write_text(WIDE)
    assert counters.main(["cuda", "--csv", str(source), "--output", str(output)]) == 0
    text = output.read_text()
    assert "a-host" not in text and "somewhere" not in text and str(tmp_path) not in text
    forward, rows, fill = json.loads(text)["kernels"]
    assert (forward["kernel"], forward["us"]) == ("forward_kernel", 1250.5)
    assert (forward["registers"], forward["occupancy"]) == (168, 25)
    assert forward["shares"]["tensor cores"] == 71.5 and forward["shares"]["DRAM"] is None
    assert forward["binds"] == "tensor cores" and fill["binds"] == "DRAM"
    assert rows["binds"] == "waiting (wait, long_scoreboard)"
    assert rows["stalls"] == {"wait": 2.5, "long_scoreboard": 1.5}
    shown = capsys.readouterr().out.splitlines()
    table = [[cell.strip() for cell in row.strip("|").split("|")] for row in shown if row.startswith("|")]
    kernels = {row[0]: dict(zip(table[0], row, strict=True)) for row in table[2:]}
    assert [*kernels] == ["forward_kernel", "fill"]  # what takes less than 1 % is left out
    assert kernels["forward_kernel"]["tensor cores"] == "72 %" and kernels["forward_kernel"]["DRAM"] == "-"
    assert kernels["forward_kernel"]["µs"] == "1,250" and kernels["fill"]["binds"] == "DRAM"


def test_both_of_ncus_tables_are_read():
    import counters

    assert counters.read(LONG) == [
        {"kernel": FORWARD, "gpu__time_duration.sum": 1250500, "launch__registers_per_thread": 168}
    ]
    first = counters.summarise(counters.read(LONG)[0])
    assert (first["us"], first["binds"]) == (1250.5, "not measured")


def test_shares_of_active_cycles_stand_in():
    import counters

    found = counters.summarise({"kernel": "k", "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active": 61.0})
    assert found["shares"]["ALU"] == 61 and found["binds"] == "ALU"


@pytest.mark.parametrize(
    "text, said",
    [("==ERROR== ERR_NVGPUCTRPERM\n", "ERR_NVGPUCTRPERM"), ("==PROF== no kernels\n", "nothing was profiled")],
)
def test_ncus_complaint_is_shown(tmp_path, capsys, text, said):
    import counters

    source = tmp_path / "ncu.csv"
    source.write_text(text)
    assert counters.main(["cuda", "--csv", str(source), "--output", str(tmp_path / "out.json")]) == 1
    assert said in capsys.readouterr().err and not (tmp_path / "out.json").exists()


def test_without_ncu_it_says_so(tmp_path, no_ncu, capsys):
    import counters

    assert counters.main(["cuda", "--output", str(tmp_path / "out.json")]) == 1
    assert "ncu cannot be run" in capsys.readouterr().err


def test_a_metric_that_ncu_does_not_know_is_left_out(tmp_path, monkeypatch):
    import counters

    program = tmp_path / "ncu"
    program.write_text(f"""#!/bin/sh
while [ "$1" != "--log-file" ]; do
  [ "$1" = "--metrics" ] && unknown=yes
  shift
done
if [ -n "$unknown" ]; then echo '==ERROR== Failed to find metric regex:^sm__x' > "$2"; exit 1; fi
/bin/cat > "$2" <<'END'
{WIDE}
END
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    output = tmp_path / "out.json"
    assert counters.main(["cuda", "--output", str(output)]) == 0
    assert len(json.loads(output.read_text())["kernels"]) == 3 and output.with_suffix(".log").exists()


def test_command_and_call(capsys, monkeypatch):
    import shlex

    import counters

    assert counters.main(["triton", "--head-dim", "128", "--show"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:5] == ["ncu", "--profile-from-start", "off", "--clock-control", "none"]
    inner = words[words.index(str(Path(counters.__file__))) + 1 :]
    assert inner == ["triton", "--head-dim", "128", "--call"]

    calls = []
    monkeypatch.setattr("lib.harness.Run.step", lambda run, direction: calls.append(direction))
    sizes = ["--length", "32", "--tokens", "64", "--heads", "2", "--head-dim", "8", "--mem-len", "8", "--both-streams"]
    assert counters.main(["reference", "--device", "cpu", *sizes, "--dtype", "float32", "--call"]) == 0
    assert calls == ["backward"] * 2
