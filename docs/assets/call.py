"""Draws the layers of the package and the steps of one call: `python docs/assets/call.py` writes the SVGs."""

from __future__ import annotations

from pathlib import Path

from drawing import Drawing, write

PYTHON, CHOICE, FORWARD, BACKWARD, RESULT = 5, 6, 4, 7, 1  # colours of boxes
LEFT, RIGHT = 84, 792  # edges of the layers


def draw_architecture() -> Drawing:
    """The layers of the package, each of which uses the one below."""
    drawing = Drawing("The package: models, layers, the operator, its checks, backends and kernels", 486)

    def layer(y: float, height: float, name: str, *boxes: str, colour: int = PYTHON) -> None:
        drawing.text(8, y + height / 2, name)
        width = (RIGHT - LEFT - 12 * (len(boxes) - 1)) / len(boxes)
        for number, lines in enumerate(boxes):
            drawing.box(LEFT + number * (width + 12), y, width, height, lines, colour)

    layer(8, 46, "models", "model/\nXLNet with its heads",
          "integrations/\nstand-ins in models of other libraries")  # fmt: skip
    layer(80, 46, "layers", "attention.py\nTwoStreamAttention, also in the XLNet stand-in",
          "integrations/adapter.py, conformer.py\nRelPositionAttention")  # fmt: skip
    layer(152, 46, "operator", "functional.rel_attention\nthe public signature; arguments become one Call")
    layer(224, 46, "checks", "fast_path.py, csrc/fast_path\nplain calls: in C++",
          "functional.attend, call_checks.py\nother calls: shards, casts, checks, defaults")  # fmt: skip
    layer(296, 46, "choice", "backends/__init__.py\nthe first backend that serves the call", colour=CHOICE)
    column = (RIGHT - LEFT - 48) / 5
    places = [LEFT + number * (column + 12) for number in range(5)]
    drawing.text(8, 391, "operators")
    drawing.box(places[0], 368, places[4] - places[0] - 12, 46, "ops.py\noperators of torch, with gradients", CHOICE)
    drawing.text(8, 459, "backends")
    names = ("cpu\ncsrc/cpu", "cuda\ncsrc/cuda", "triton\nbackends/triton", "torch\ntorch_blocks.py")
    for x, lines in zip(places, names, strict=False):
        drawing.box(x, 440, column, 38, lines, FORWARD)
        drawing.arrow((x + column / 2, 414), (x + column / 2, 439))
    drawing.box(places[4], 368, column, 110, "reference\nreference.py:\nthe definition in\nplain torch", FORWARD)

    quarter = (RIGHT - LEFT) / 4
    for y in (54, 126, 198, 270):
        for x in (LEFT + quarter, RIGHT - quarter):
            drawing.arrow((x, y), (x, y + 25))
    for x in (LEFT + quarter, places[4] + column / 2):
        drawing.arrow((x, 342), (x, 367))
    return drawing


def draw_call() -> Drawing:
    """One call, forward and backward, from its arguments to its results."""
    drawing = Drawing("A call: checks and choice, forward's steps over tiles, backward's steps", 518)
    width, (first, second, third) = 240, (10, 280, 550)

    def chain(x: float, y: float, steps: tuple[str, ...], colour: int, height: float = 40) -> None:
        for number, lines in enumerate(steps):
            if number:
                drawing.arrow((x + width / 2, y - 10), (x + width / 2, y - 1))
            drawing.box(x, y, width, height, lines, colour)
            y += height + 10

    def kernel(x: float, name: str, steps: tuple[str, ...], colour: int) -> None:
        """Preparation, the loop over tiles in a frame, the end."""
        middle = x + width / 2
        drawing.text(middle, 12, name, "middle", "bold")
        chain(x, 28, steps[:1], colour)
        drawing.frame(x - 6, 80, width + 12, 324)
        drawing.text(x + 2, 95, "for each tile of rows and keys", style="small")
        chain(x, 108, steps[1:-1], colour)
        chain(x, 416, steps[-1:], colour)
        drawing.arrow((middle, 68), (middle, 79))
        drawing.arrow((middle, 404), (middle, 415))

    drawing.text(first + width / 2, 12, "call", "middle", "bold")
    chain(first, 28, (
        "rel_attention(query, key, ...)\nmasks become vectors of ranks",
        "checks and defaults\nof shapes, dtypes, devices, values",
        "choice of a backend\nby device, dtype and head_dim",
        "self-check\non a GPU without a passed test",
        "operator\nwith gradients",
    ), PYTHON, 46)  # fmt: skip
    kernel(second, "forward", (
        "prepare\nbiases, row order, key bounds",
        "band\n(query + v) times a window of r",
        "shift\neach row from its own offset on",
        "content\n+ (query + u) times key",
        "segments, mask\na term by segment; hidden: -inf",
        "softmax, dropout\nrow_max, row_sum so far",
        "values\nout += probabilities times value",
        "epilogue\nout / row_sum, rounded; lse",
    ), FORWARD)  # fmt: skip
    kernel(third, "backward", (
        "prepare\ndelta, of gradients and out",
        "scores again\nas in forward, up to the mask",
        "probabilities again\nexp(score - row_max) / row_sum",
        "dP\ngradient of out times value",
        "dS\nprobabilities times (dP - delta)",
        "shift back\nthe band of dS",
        "sums\nof query, key, value, rel_key",
        "epilogue\nof biases and segments",
    ), BACKWARD)  # fmt: skip
    drawing.box(first, 400, width, 38, "out, lse", RESULT)
    drawing.box(first, 448, width, 62, "kept for backward\ninputs, out, row_max, row_sum,\nout_residual (16 bits)",
                RESULT)  # fmt: skip
    drawing.box(third, 472, width, 38, "gradients", RESULT)
    edge = first + width
    drawing.arrow((edge, 275), (edge + 12, 275), (edge + 12, 48), (second - 1, 48))
    drawing.arrow((second, 428), (edge + 1, 428))
    drawing.arrow((second, 452), (edge + 1, 452))
    drawing.arrow((edge, 490), (third - 15, 490), (third - 15, 48), (third - 1, 48))
    drawing.arrow((third + width / 2, 456), (third + width / 2, 471))
    return drawing


DRAWINGS = {"architecture": draw_architecture, "call": draw_call}


if __name__ == "__main__":
    write(DRAWINGS, Path(__file__).parent)
