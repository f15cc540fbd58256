"""What a run of attn.py comes to in a few lines: this package against the best of plain attention and its peers."""

from __future__ import annotations

from collections.abc import Iterator

from implementations import FLOOR, TRANSFORMERS

PEERS = {
    TRANSFORMERS: "transf.",
    "SDPA + bias": "SDPA+bias",
    "SDPA + bias compiled": "compiled",
    "FlexAttention": "Flex",
}


def headline(rows: list[dict]) -> Iterator[str]:
    """Lines of text, one backend of this package after the other; none where nothing was timed.

    "backward" is forward and backward together less the forward, for both sides.
    """
    timed = [row for row in rows if "median_ms" in row]
    core = [row for row in timed if row["section"] == "core"]
    own = dict.fromkeys(row["implementation"] for row in core if row["implementation"].startswith("xlnet_kernels "))
    for name in own:
        yield f"{name}: times the best plain SDPA's, and how many times as fast as peers (forward + backward)"
        yield f"{'L':>7}{'forward':>10}{'backward':>10}" + "".join(f"{short:>11}" for short in PEERS.values())
        for length in sorted({row["length"] for row in core}):
            here = {
                (row["implementation"], row["direction"]): row["median_ms"] for row in core if row["length"] == length
            }
            yield f"{length:7}" + _against_floor(here, name) + _against_peers(here, name)
    for row in timed:
        if row["section"] == "streams" and row.get("ratio_to_floor", 1) != 1:
            both = " + backward" if row["direction"] == "backward" else ""
            yield f"both streams, L {row['length']}, forward{both}: {row['ratio_to_floor']:.2f} x the content stream"
        if row["section"] == "long" and row.get("peak_bytes") is not None:
            peak = f"{row['peak_bytes'] / 1e9:.2f} GB"
            yield f"L {row['length']}, forward + backward: {row['implementation']} needs {peak}"


def _against_floor(here: dict[tuple[str, str], float], name: str) -> str:
    floors = {direction: [ms for (one, d), ms in here.items() if one.startswith(FLOOR) and d == direction]
              for direction in ("forward", "backward")}  # fmt: skip
    best = {direction: min(found, default=None) for direction, found in floors.items()}
    mine = {direction: here.get((name, direction)) for direction in floors}
    forward = backward = None
    if mine["forward"] and best["forward"]:
        forward = mine["forward"] / best["forward"]
        if mine["backward"] and best["backward"]:
            backward = (mine["backward"] - mine["forward"]) / (best["backward"] - best["forward"])
    return _cell(forward, 10) + _cell(backward, 10)


def _against_peers(here: dict[tuple[str, str], float], name: str) -> str:
    mine = here.get((name, "backward"))
    theirs = (here.get((peer, "backward")) for peer in PEERS)
    return "".join(_cell(ms / mine if ms and mine else None, 11) for ms in theirs)


def _cell(ratio: float | None, width: int) -> str:
    return f"{'-' if ratio is None else f'{ratio:.2f}':>{width}}"
