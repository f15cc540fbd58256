"""The model tests of transformers, NeMo or SpeechBrain, from a checkout, plain and with accelerated attention.

    python tests/integrations/peers.py CHECKOUT [--tests PATH ...] [--json FILE] [-- ARGUMENT_OF_PYTEST ...]

This Python runs the checkout's own code. In the second run `accelerate` gets each model at its first call. Tests whose
outcomes differ run once more, with other random numbers: those that differ again are printed.

Exit status: 0 where no test differs, 1 where some do, 2 where nothing could be compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
_MODELS = (
    "xlnet",
    "parakeet",
    "nemotron_asr_streaming",
    "nemotron3_5_asr",
    "nemotron_h_omni",
    "canary",
    "cohere_asr",
    "fastspeech2_conformer",
    "wav2vec2_conformer",
    "wav2vec2_bert",
    "seamless_m4t",
    "seamless_m4t_v2",
)
_NEMO = (
    "asr/test_conformer_encoder.py",
    "asr/test_asr_local_attn.py",
    "asr/test_padding_and_batch_size_invariance.py",
    "asr/test_asr_interctc_models.py",
    "asr/test_asr_multitask_model_bpe.py",
    "asr/test_asr_exportables.py",
    "asr/mixins/adapters/test_asr_adapter_mixin.py",
    "asr/mixins/adapters/test_asr_adapter_modules.py",
    "speaker_tasks/test_diar_sortformer_models.py",
)


class Peer(NamedTuple):
    """A library: a folder of sources that its checkouts have, and its tests of models with relative attention."""

    sources: str
    tests: tuple[str, ...]


PEERS = {
    "transformers": Peer("src/transformers", tuple(f"tests/models/{name}/test_modeling_{name}.py" for name in _MODELS)),
    "NeMo": Peer("nemo/collections/asr", tuple(f"tests/collections/{name}" for name in _NEMO)),
    "SpeechBrain": Peer("speechbrain/nnet", ("tests/unittests/test_attention.py", "tests/unittests/test_conformer.py")),
}


class CannotCompare(Exception):
    """Why there is nothing to compare, in a sentence."""


def find_tests(checkout: Path, wanted: list[str]) -> list[str]:
    """The test files to run, relative to the checkout.

    Raises:
        CannotCompare: the folder is no checkout of a known library, or is without tests.
    """
    if not checkout.is_dir():
        raise CannotCompare(f"CHECKOUT must be a folder, got {checkout}, which is none")
    names = [name for name, peer in PEERS.items() if (checkout / peer.sources).is_dir()]
    if not names:
        needed = ", ".join(f"{peer.sources} ({name})" for name, peer in PEERS.items())
        raise CannotCompare(f"CHECKOUT must be a checkout with one of {needed}, got {checkout}")
    peer = PEERS[names[0]]
    if absent := [name for name in wanted if not (checkout / name).exists()]:
        raise CannotCompare(f"--tests must name files or folders in {checkout}, got {absent[0]}, which is not there")
    found = wanted or [name for name in peer.tests if (checkout / name).is_file()]
    if not found:
        raise CannotCompare(
            f"CHECKOUT must have tests such as {peer.tests[0]}, got {checkout} without them: packages have none, "
            f"repositories do"
        )
    return found


def run_tests(checkout: Path, tests: list[str], options: list[str], seed: int, accelerated: bool) -> dict[str, Any]:
    """The record of a run by `peers_plugin`, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "outcomes.json", Path(folder) / "log.txt"
        plugin = ["-p", "peers_plugin", f"--peer-outcomes={file}", f"--peer-seed={seed}"]
        plugin += ["--peer-accelerate"] if accelerated else []
        command = [sys.executable, "-m", "pytest", *tests, *plugin, "-q", "-p", "no:cacheprovider"]
        # The checkout comes first, because the library may be installed too.
        paths = [str(checkout / "src"), str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        start = time.monotonic()
        with log.open("w") as output:
            done = subprocess.run(
                [*command, "--continue-on-collection-errors", *options],
                cwd=checkout,
                env=os.environ | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if not file.is_file():
            last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise CannotCompare(f"pytest ended with status {done.returncode} and without outcomes:\n{last}")
        return json.loads(file.read_text()) | {"seconds": time.monotonic() - start}


def differing(plain: dict[str, Any], accelerated: dict[str, Any]) -> dict[str, tuple[str, str, str]]:
    """Tests whose outcomes differ: both outcomes, and the error of the run that failed."""
    found = {}
    for name in sorted({*plain["tests"], *accelerated["tests"]}):
        absent = {"outcome": "absent", "message": ""}
        first, second = (facts["tests"].get(name, absent) for facts in (plain, accelerated))
        if first["outcome"] != second["outcome"]:
            found[name] = first["outcome"], second["outcome"], second["message"] or first["message"]
    return found


def compare(checkout: Path, tests: list[str], options: list[str]) -> dict[str, Any]:
    """Both runs, and the tests that differ in them and once more with another seed.

    Raises:
        CannotCompare: a run ended early, no test ran, or no accelerated model was called.
    """
    runs = {}
    for name in ("plain", "accelerated"):
        print(f"{name} ...", file=sys.stderr, flush=True)
        runs[name] = run_tests(checkout, tests, options, 0, name == "accelerated")
    outcomes = runs["accelerated"]["tests"].values()
    if not any(test["accelerated"] for test in outcomes):
        reasons = runs["accelerated"]["refused"] or sorted({test["message"] for test in outcomes} - {""})
        raise CannotCompare("\n".join(["no test called an accelerated model", *reasons[:5]]))
    differ = differing(runs["plain"], runs["accelerated"])
    varies = []
    if again := [name for name in differ if "absent" not in differ[name]]:
        print(f"once more: {len(again)} ...", file=sys.stderr, flush=True)
        second = differing(*(run_tests(checkout, again, options, 1, way) for way in (False, True)))
        varies = [name for name in again if second.get(name, ())[:2] != differ[name][:2]]
    return runs | {"differ": {name: differ[name] for name in differ if name not in varies}, "varies": varies}


def report(facts: dict[str, Any]) -> str:
    """Versions, a table of the test files, and the tests that differ."""
    plain, accelerated = facts["plain"], facts["accelerated"]
    lines = [", ".join(f"{name} {version}" for name, version in accelerated["versions"].items())]
    lines += [f"{name}: {facts[name]['seconds']:.0f} s" for name in ("plain", "accelerated")]
    lines += ["", f"{'':<56}  tests  passed plain, accelerated  call accelerated models  differ"]
    for file in sorted({name.partition("::")[0] for name in accelerated["tests"]}):
        first, second = ([x for name, x in run["tests"].items() if _is_in(name, file)] for run in (plain, accelerated))
        passed = [Counter(test["outcome"] for test in run)["passed"] for run in (first, second)]
        calls = sum(test["accelerated"] for test in second)
        count = sum(_is_in(name, file) for name in facts["differ"])
        lines.append(f"{file:<56}  {len(second):>5}  {passed[0]:>12}  {passed[1]:>11}  {calls:>23}  {count:>6}")
    lines += ["", *(f"not accelerated: {reason}" for reason in accelerated["refused"])]
    lines += [f"varies with random numbers: {name}" for name in facts["varies"]]
    for name, (before, after, message) in facts["differ"].items():
        lines.append(f"differs: {name}: {before} plain, {after} accelerated{': ' if message else ''}{message}")
    return "\n".join([*lines, f"{len(facts['differ'])} tests differ"])


def _is_in(name: str, file: str) -> bool:
    return name.partition("::")[0] == file


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", metavar="CHECKOUT", type=Path)
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="other tests than those of the models")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes")
    given = parser.parse_args(arguments[:cut])
    try:
        if importlib.util.find_spec("pytest") is None:
            raise CannotCompare(f"pytest must be installed for {sys.executable}: pip install pytest")
        tests = find_tests(given.checkout, given.tests)
        facts = compare(given.checkout.resolve(), tests, arguments[cut + 1 :])
    except CannotCompare as reason:
        print(reason, file=sys.stderr)
        return 2
    if given.json:
        given.json.write_text(json.dumps(facts, indent=1))
    print(report(facts))
    return 1 if facts["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
