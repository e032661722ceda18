"""Draws the pictures of the guide to pipelines: python docs/pictures/draw_pipeline.py

The timelines are those of the simulator; all that share a picture share its scale of time.
"""

from draw import COLOURS, COMM, HERE, INK, PALE, Picture

from tfpar.pipeline import timeline
from tfpar.pipeline.schedule import gpipe, interleaved, one_f_one_b
from tfpar.pipeline.simulate import simulate

WHITE, GREY, TINTS = "#ffffff", "#777777", ["#eef3f8", "#fdf2e6"]


class Drawing(Picture):
    """A `Picture` that also has lines, heads of arrows and rounded cards."""

    def card(self, x, y, w, h, colour, line, radius=8):
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{radius}" fill="{colour}" '
            f'stroke="{line}"/>'
        )

    def line(self, path, colour=INK, width=1.5, dashed=False):
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'
        )

    def head(self, x, y, way, colour=COMM):
        """The head of an arrow that ends at a point: way is "right", "left", "up" or "down"."""
        dx, dy = {"right": (-9, 0), "left": (9, 0), "up": (0, 9), "down": (0, -9)}[way]
        a, b = (x + dx - dy * 0.6, y + dy - dx * 0.6), (x + dx + dy * 0.6, y + dy + dx * 0.6)
        self.parts.append(
            f'<path d="M{x} {y} L{a[0]:.1f} {a[1]:.1f} L{b[0]:.1f} {b[1]:.1f} Z" fill="{colour}"/>'
        )

    def both_ways(self, x, y, end, upright=False):
        """An arrow with two heads: from (x, y) to x or y = `end`."""
        if upright:
            self.line(f"M{x} {y + 6} V{end - 6}", COMM, 3)
            self.head(x, y, "up")
            self.head(x, end, "down")
        else:
            self.line(f"M{x + 6} {y} H{end - 6}", COMM, 3)
            self.head(x, y, "left")
            self.head(end, y, "right")


def axes():
    """What each axis splits, over four devices."""
    p = Drawing(900, 445)
    p.text(435, 22, "What each axis splits; a colour is a device", 15, weight="bold")
    p.text(110, 50, "batch", 12, GREY)
    p.text(400, 50, "weights of four layers", 12, GREY)
    p.text(745, 50, "what travels", 12, GREY)
    sends = [
        "all-reduce of gradients:\nas many as weights, once an update\n"
        "(once a micro-batch, if there are any)",
        "all-reduces of activations:\nin a transformer block two forward\nand two backward",
        "activations at the cuts:\nforward once, their gradients back\nonce, for each micro-batch",
    ]
    for row, (axis, words) in enumerate(zip(("data", "model", "pipe"), sends, strict=True)):
        y = 75 + 135 * row
        p.text(10, y + 45, f"{axis}=4", 14, weight="bold")
        _batch(p, 80, y, axis)
        p.arrow(165, y + 40, 60)
        for k in range(4):
            _layer(p, 240 + 88 * k, y, axis, k)
            if k < 3:
                crossed = axis != "data"
                p.arrow(306 + 88 * k, y + 40, 20, comm=crossed)
        p.text(745, y + 28, words, 12, COMM, "bold")
    p.save("axes")


def _batch(p, x, y, axis):
    if axis == "model":  # the same rows on all
        for k in (3, 2, 1, 0):
            p.box(x + 4 * k, y + 6 - 4 * k, 60, 74, COLOURS[k])
        return
    for k in range(4):
        if axis == "data":
            p.box(x, y + 20 * k, 66, 20, COLOURS[k])
        else:
            p.box(x, y + 20 * k, 66, 16, COLOURS[0])
            p.text(x + 33, y + 13 + 20 * k, f"micro-batch {k}", 9, WHITE)


def _layer(p, x, y, axis, place):
    if axis == "data":
        for k in (3, 2, 1, 0):
            p.box(x + 4 * k, y + 6 - 4 * k, 50, 74, COLOURS[k])
    for k in range(4) if axis == "model" else ():
        p.box(x + 15 * k, y, 15, 80, COLOURS[k])
    if axis == "pipe":
        p.box(x, y, 60, 80, COLOURS[place])


def mesh():
    """Mesh(pipe=2, data=2, model=2): which of the 8 devices holds what."""
    p = Drawing(960, 520)
    p.text(465, 22, "Mesh(pipe=2, data=2, model=2): what each device holds", 15, weight="bold")
    for pipe in range(2):
        left = 0 + 500 * pipe
        p.card(left, 45, 430, 405, TINTS[pipe], COLOURS[pipe], 12)
        layers = ("first", "second")[pipe]
        p.text(
            left + 215, 70, f"stage mesh {pipe}: the {layers} half of the layers", 13, INK, "bold"
        )
        for data in range(2):
            for model in range(2):
                _device(p, left + 20 + 220 * model, 90 + 190 * data, pipe, data, model)
        for data in range(2):
            p.both_ways(left + 190, 165 + 190 * data, left + 240)
        p.both_ways(left + 105, 240, 280, upright=True)
        p.both_ways(left + 325, 240, 280, upright=True)
        p.text(left + 215, 146, "model", 12, COMM, "bold")
        p.text(left + 215, 336, "model", 12, COMM, "bold")
        p.text(left + 215, 264, "data", 12, COMM, "bold")
    for y in (165, 355):
        p.line(f"M431 {y - 8} H492", COMM, 3)
        p.head(499, y - 8, "right")
        p.line(f"M499 {y + 8} H440", COMM, 3)
        p.head(432, y + 8, "left")
        p.text(465, y - 20, "pipe", 12, COMM, "bold")
    for x, words in (
        (120, "model: activations, in every block"),
        (432, "data: gradients, and what ZeRO splits"),
        (765, "pipe: activations at the cut, their gradients back"),
    ):
        p.text(x, 480, words, 12, COMM, "bold")
    p.text(
        465,
        504,
        "neighbours along model have neighbouring numbers: let these share the fastest links",
        12,
        GREY,
    )
    p.save("mesh")


def _device(p, x, y, pipe, data, model):
    colour = COLOURS[pipe]
    p.card(x, y, 170, 150, WHITE, colour)
    p.text(x + 85, y + 22, f"device {4 * pipe + 2 * data + model}", 13, weight="bold")
    p.text(x + 85, y + 38, f"pipe {pipe}, data {data}, model {model}", 10, GREY)
    for k in range(2):
        p.box(x + 18 + 27 * k, y + 50, 27, 60, colour if k == model else PALE)
        p.box(x + 98, y + 50 + 30 * k, 54, 30, colour if k == data else PALE)
    p.text(x + 45, y + 126, "weights", 11)
    p.text(x + 125, y + 126, "rows", 11)
    p.text(x + 45, y + 140, f"half {model}", 10, GREY)
    p.text(x + 125, y + 140, f"half {data}", 10, GREY)


def cut():
    """A model with a skip and a shared table, cut into four stages."""
    p = Drawing(930, 275)
    p.text(450, 22, "A model with a skip and a shared table in four stages", 15, weight="bold")
    stages = [
        ["table", "block 0", "block 1"],
        ["block 2", "block 3", "block 4"],
        ["block 5", "add", "block 6"],
        ["block 7", "norm", "logits"],
    ]
    for k, calls in enumerate(stages):
        x = 240 * k - 10
        p.card(x, 105, 190, 90, WHITE, COLOURS[k], 10)
        p.text(x + 95, 212, f"stage {k}", 12, COLOURS[k], "bold")
        for place, call in enumerate(calls):
            fill = COLOURS[k]
            p.card(x + 8 + 59 * place, 125, 56, 50, fill, WHITE, 5)
            p.text(x + 36 + 59 * place, 154, call, 10, WHITE)
        if k < 3:
            p.line(f"M{x + 191} 141 H{x + 232}", COMM, 3)
            p.head(x + 239, 141, "right")
            p.line(f"M{x + 239} 159 H{x + 198}", COMM, 3)
            p.head(x + 191, 159, "left")
    # The skip: from block 1 of stage 0 to the add of stage 2.
    p.line("M144 125 V75 Q144 65 154 65 H555 Q565 65 565 75 V117", COMM, 3)
    p.head(565, 125, "down")
    p.text(
        354, 57, "a skip goes straight from mesh 0 to mesh 2, its gradient back", 12, COMM, "bold"
    )
    # The shared table.
    p.line("M26 175 V245 Q26 255 36 255 H846 Q856 255 856 245 V175", COLOURS[0], 2, dashed=True)
    p.text(
        441,
        247,
        "a shared weight: a copy on each mesh that uses it; gradients added once a batch, values sent "
        "once an update",
        12,
        COLOURS[0],
        "bold",
    )
    p.save("cut")


def stacked(name, drawn):
    """One picture of several timelines, (title, `Timeline`), on one scale of time."""
    longest = max(found.makespan for _, found in drawn)
    room = timeline.LEFT + timeline.RIGHT
    full, top, parts = timeline.WIDTH, 0, []
    for title, found in drawn:
        timeline.WIDTH = room + (full - room) * found.makespan / longest
        lines = timeline.svg(found, title).splitlines()
        timeline.WIDTH = full
        parts += [f'<g transform="translate(0 {top})">', *lines[2:-1], "</g>"]
        top += timeline.TOP + found.ranks * (timeline.LANE + timeline.GAP) + 45
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full} {top}" width="{full}" '
        f'height="{top}" font-family="sans-serif">\n<rect width="100%" height="100%" fill="white"/>'
    )
    (HERE / f"{name}.svg").write_text("\n".join([head, *parts, "</svg>\n"]), encoding="utf-8")


def schedules():
    """Four stages, eight micro-batches; a backward pass takes twice a forward pass."""
    stacked(
        "schedules",
        [
            ("gpipe, 4 stages, 8 micro-batches", simulate(gpipe(4, 8))),
            ("1f1b", simulate(one_f_one_b(4, 8))),
            ("interleaved, 2 chunks a mesh", simulate(interleaved(4, 8, 2), 0.5, 1.0)),
        ],
    )


def balance():
    """Four stages, sixteen micro-batches; then stage 1 takes 1.5 times as long."""
    slow = [1.0, 1.5, 1.0, 1.0]
    stacked(
        "balance",
        [
            ("1f1b, 4 equal stages, 16 micro-batches", simulate(one_f_one_b(4, 16))),
            (
                "stage 1 is 1.5 times slower",
                simulate(one_f_one_b(4, 16), slow, [2 * cost for cost in slow]),
            ),
        ],
    )


if __name__ == "__main__":
    for draw in (axes, mesh, cut, schedules, balance):
        draw()
