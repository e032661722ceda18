"""Draws the pictures of the guide to tensor parallelism: python docs/pictures/draw.py

Each picture is a row of tensors and ops. A tensor is a box of shards, one colour a device; four
boxes behind each other are the same values on four devices.
"""

import pathlib

COLOURS = ["#4e79a7", "#f28e2b", "#59a14f", "#b07aa1"]
INK, PALE, COMM = "#333333", "#e8e8e8", "#d62728"
HERE = pathlib.Path(__file__).parent


class Picture:
    def __init__(self, width, height):
        self.size = width, height
        self.parts = []

    def text(self, x, y, words, size=13, colour=INK, weight="normal"):
        for k, line in enumerate(words.split("\n")):
            self.parts.append(
                f'<text x="{x}" y="{y + k * (size + 3)}" font-size="{size}" fill="{colour}" '
                f'font-weight="{weight}" text-anchor="middle">{line}</text>'
            )

    def box(self, x, y, w, h, colour, line="#ffffff"):
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{colour}" stroke="{line}"/>'
        )

    def tensor(self, x, y, w, h, split, name, shape):
        """A tensor at its upper left corner; split None (whole), "rows" or "columns"."""
        if split is None:
            for k in (3, 2, 1, 0):
                self.box(x + 4 * k, y - 4 * k, w, h, COLOURS[k])
        for k in range(4) if split else []:
            if split == "columns":
                self.box(x + k * w / 4, y, w / 4, h, COLOURS[k])
            else:
                self.box(x, y + k * h / 4, w, h / 4, COLOURS[k])
        self.text(x + w / 2, y + h + 18, name, weight="bold")
        self.text(x + w / 2, y + h + 34, shape, size=11)

    def arrow(self, x, y, length, words="", comm=False):
        colour = COMM if comm else INK
        end = x + length
        self.parts.append(
            f'<path d="M{x} {y} H{end - 7}" stroke="{colour}" stroke-width="{3 if comm else 1.5}"/>'
            f'<path d="M{end - 8} {y - 5} L{end} {y} L{end - 8} {y + 5} Z" fill="{colour}"/>'
        )
        self.text(
            x + length / 2,
            y - 9 - 15 * words.count("\n"),
            words,
            size=12,
            colour=colour,
            weight="bold" if comm else "normal",
        )

    def save(self, name):
        width, height = self.size
        body = "\n".join(self.parts)
        (HERE / f"{name}.svg").write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-30 0 {width + 30} {height}" '
            f'width="{width + 30}" height="{height}" font-family="sans-serif">\n'
            f'<rect x="-30" width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
        )


def split_and_summed(title, x, columns, op, hidden, rows):
    """Columns, an op on each device's own, rows, one all-reduce; names with their shapes."""
    p = Picture(880, 250)
    p.text(440, 22, title, 15, weight="bold")
    p.tensor(20, 90, 60, 60, None, "x", x)
    p.arrow(105, 120, 90, "times")
    p.tensor(205, 75, 120, 60, "columns", *columns)
    p.arrow(335, 120, 65, op)
    p.tensor(410, 90, 120, 60, "columns", hidden, "each device its own")
    p.arrow(540, 120, 55, "times")
    p.tensor(610, 60, 60, 120, "rows", *rows)
    p.arrow(690, 120, 90, "all-reduce", comm=True)
    p.tensor(795, 90, 60, 60, None, "y", x)
    return p


def pair():
    split_and_summed(
        "Columns, then rows: one all-reduce for two matrices",
        "(rows, d)",
        ("up/kernel", '(None, "model")'),
        "gelu",
        "hidden units",
        ("down/kernel", '("model", None)'),
    ).save("pair")


def attention():
    split_and_summed(
        "Attention by heads: one all-reduce",
        "(batch, seq, d)",
        ("query, key, value", '(None, "model", None)'),
        "softmax",
        "heads",
        ("attention_output", '("model", None, None)'),
    ).save("attention")


def vocabulary():
    p = Picture(880, 420)
    p.text(440, 22, "The vocabulary: rows of the table, columns of the logits", 15, weight="bold")
    p.tensor(20, 100, 50, 50, None, "ids", "(batch, seq)")
    p.arrow(95, 125, 110, "look up\nown rows")
    p.tensor(215, 60, 60, 130, "rows", "embeddings", '("model", None)')
    p.arrow(290, 125, 130, "all-reduce\n(batch, seq, d)", comm=True)
    p.tensor(440, 100, 60, 50, None, "rows", "(batch, seq, d)")
    p.tensor(20, 290, 60, 50, None, "x", "(batch, seq, d)")
    p.arrow(105, 315, 60, "times")
    p.tensor(175, 290, 130, 50, "columns", "logits/kernel", '(None, "model")')
    p.arrow(315, 315, 55)
    p.tensor(380, 290, 130, 50, "columns", "logits", "(batch, seq, V): stay split")
    p.arrow(520, 315, 200, "3 all-reduces: max, sum, label\n(batch, seq) each", comm=True)
    p.tensor(740, 290, 50, 50, None, "loss", "(batch, seq)")
    p.save("vocabulary")


def sequence():
    p = Picture(960, 250)
    p.text(
        480,
        22,
        "Sequence parallelism: the same volume, a shard of the activations",
        15,
        weight="bold",
    )
    p.tensor(20, 90, 60, 60, "rows", "norm, dropout", '("data", "model", None)')
    p.arrow(95, 120, 110, "all-gather", comm=True)
    p.tensor(215, 90, 60, 60, None, "x", '("data", None, None)')
    p.arrow(300, 120, 55, "times")
    p.tensor(365, 75, 120, 60, "columns", "up/kernel", '(None, "model")')
    p.arrow(495, 120, 50, "gelu")
    p.arrow(545, 120, 55, "times")
    p.tensor(610, 60, 60, 120, "rows", "down/kernel", '("model", None)')
    p.arrow(690, 120, 130, "reduce-scatter", comm=True)
    p.tensor(835, 90, 60, 60, "rows", "norm, dropout", '("data", "model", None)')
    p.save("sequence")


def zero():
    p = Picture(880, 330)
    p.text(
        440, 22, "ZeRO: what each of 4 devices of `data` holds (Adam, float32)", 15, weight="bold"
    )
    names = [
        ("weights", "#4e79a7", 1, 3),
        ("gradients", "#f28e2b", 1, 2),
        ("slots", "#59a14f", 2, 1),
    ]
    sends = [
        "all-reduce of gradients",
        "reduce-scatter of gradients, all-gather of weights",
        "reduce-scatter of gradients, all-gather of weights",
        "all-gather of weights, reduce-scatter of gradients",
    ]
    for stage in range(4):
        y, x = 50 + 62 * stage, 90
        p.text(45, y + 25, f"zero={stage}", weight="bold")
        for _, colour, parts, since in names:
            width = 90 * parts
            p.box(x, y, width, 36, PALE)
            p.box(x, y, width / 4 if stage >= since else width, 36, colour)
            x += width + 6
        p.text(670, y + 23, sends[stage], 12, COMM, "bold")
    x = 90
    for name, _, parts, _ in names:
        p.text(x + 45 * parts, 312, name)
        x += 90 * parts + 6
    p.save("zero")


if __name__ == "__main__":
    for draw in (pair, attention, vocabulary, sequence, zero):
        draw()
