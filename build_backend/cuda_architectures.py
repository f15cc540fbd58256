"""Choice of the architectures for the CUDA kernels, with reasons for those left out.

Imports only the standard library, like build_decisions.py.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Collection
from typing import NamedTuple

LEAST = (8, 0)  # for cp.async and mma of bfloat16, used by csrc/cuda
# Names that torch accepts in TORCH_CUDA_ARCH_LIST
NAMES = {
    "Kepler+Tesla": "3.7",
    "Kepler": "3.5+PTX",
    "Maxwell+Tegra": "5.3",
    "Maxwell": "5.0 5.2+PTX",
    "Pascal": "6.0 6.1+PTX",
    "Volta+Tegra": "7.2",
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere+Tegra": "8.7",
    "Ampere": "8.0 8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell+Tegra": "11.0",
    "Blackwell": "10.0 10.3 12.0 12.1+PTX",
}
NUMBER = re.compile(r"(\d+)\.(\d)(a?)(\+PTX)?")


class Architectures(NamedTuple):
    """Chosen architectures: `names` for TORCH_CUDA_ARCH_LIST, and a reason for each requested one left out."""

    names: list[str]
    left_out: list[str]


def known_to(nvcc: str) -> set[tuple[int, int]]:
    """The architectures supported by an nvcc; empty if unknown."""
    said = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    return {(int(number[:-1]), int(number[-1])) for number in re.findall(r"compute_(\d{2,})", said)}


def choose(
    asked: str,
    seen: Collection[tuple[int, int]],
    known: Collection[tuple[int, int]] = (),
    torch_takes: Callable[[str], bool] = lambda name: True,
) -> Architectures:
    """The architectures to compile for.

    Args:
        asked: the value of TORCH_CUDA_ARCH_LIST, "" or "native" for the GPUs `seen`, or all where there are none.
        known: architectures supported by nvcc; if empty, none are left out.
        torch_takes: whether torch's cpp_extension accepts a name.
    """

    def reason(number: tuple[int, int], name: str) -> str | None:
        if number < LEAST:
            return "the kernels need 8.0 or later"
        if known and number not in known:
            return "this nvcc does not know it"
        return None if torch_takes(name) else "this torch does not take it"

    is_asked = asked not in ("", "native")
    if not is_asked and not seen:
        return _for_all(reason)
    wanted = _expanded(asked) if is_asked else [(f"{major}.{minor}",) * 2 for major, minor in sorted(seen)]
    names: list[str] = []
    left_out, ptx = [], False
    for origin, word in wanted:
        found = NUMBER.fullmatch(word)
        if found is None:
            left_out.append(f"{word} (no architecture that torch names)")
            continue
        number = int(found[1]), int(found[2])
        # 9.0a, because wgmma of csrc/cuda/sm90 is not part of 9.0.
        name = f"{found[1]}.{found[2]}" + ("a" if number == (9, 0) else found[3])
        why = reason(number, name)
        if why is None:
            names.append(name)
            ptx = ptx or found[4] is not None
        elif not is_asked and number > LEAST:
            names, ptx = [*names, "8.0"], True
            left_out.append(f"{word} ({why}, PTX of 8.0 is for it)")
        else:
            left_out.append(f"{word if origin == word else f'{word} of {origin}'} ({why})")
    names = list(dict.fromkeys(names))
    return Architectures(_with_ptx(names) if ptx and names else names, left_out)


def _expanded(asked: str) -> list[tuple[str, str]]:
    """Pairs of each word of the list and each number that it stands for."""
    names = {name.lower(): numbers for name, numbers in NAMES.items()}
    words = re.split(r"[;,\s]+", asked.strip(" ;,\t\n\"'"))
    return [(word, number) for word in words if word for number in names.get(word.lower(), word).split()]


def _for_all(reason: Callable[[tuple[int, int], str], str | None]) -> Architectures:
    """The default without a GPU, with PTX of the last architecture for future GPUs."""
    # Checked because compute_100 needs CUDA 12.8 and torch 2.7; PTX of sm_90a is useless on other GPUs.
    newest = reason((10, 0), "10.0") is None
    return Architectures(["8.0", "9.0a", "10.0+PTX"] if newest else ["8.0+PTX", "9.0a"], [])


def _with_ptx(names: list[str]) -> list[str]:
    """The names with PTX added, which later GPUs can run: of the highest architecture without an "a", else of 8.0."""
    plain = [name for name in names if not name.endswith("a")]
    if not plain:
        return ["8.0+PTX", *names]
    last = max(plain, key=lambda name: tuple(map(int, name.split("."))))
    return [f"{name}+PTX" if name == last else name for name in names]
