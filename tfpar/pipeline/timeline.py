"""Pictures of a timeline: a lane per rank, as text or SVG."""

import html
import math
import pathlib

from tfpar.pipeline.schedule import BACKWARD, FORWARD, WEIGHTS

# Blue and orange, as in the pictures of the guides: told apart by colour-blind readers too.
COLOURS = {FORWARD: "#4e79a7", BACKWARD: "#f28e2b", WEIGHTS: "#59a14f"}
NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHTS: "backward of weights"}
FILLS = {FORWARD: "-", BACKWARD: "=", WEIGHTS: "~"}
INK, PALE, WHITE = "#333333", "#e8e8e8", "#ffffff"
WIDTH, LEFT, RIGHT, TOP = 900, 70, 30, 70  # of the SVG, in pixels
LANE, GAP = 34, 6


def text(timeline, width=100, unit=""):
    """The timeline in ASCII, a line per rank and one for the time.

    Forwards are drawn as F0--, backwards as B0==, weights' halves as W0~~, each as long as it takes;
    small letters are chunks other than the first, blanks are idle. What is too short for its number
    is letters alone.

    Args:
      timeline: a `Timeline`.
      width: characters a line, at least 30.
      unit: what the times are in, such as "ms".

    Raises:
      ValueError: a smaller width.
    """
    if width < 30:
        raise ValueError(f"width must be at least 30 characters; received {width!r}")
    names = [f"rank {rank}  " for rank in range(timeline.ranks)]
    margin = max(map(len, names))
    span = timeline.makespan or 1.0
    column = lambda seconds: round(seconds / span * (width - margin))
    lanes = [[" "] * (width - margin) for _ in names]
    for event in timeline.events:
        start, end = column(event.start), column(event.end)
        kind, m, chunk = event.action
        letter = kind.lower() if chunk else kind
        name = f"{letter}{m}" if len(f"{letter}{m}") <= end - start else letter * (end - start)
        lanes[event.rank][start:end] = name.ljust(end - start, FILLS[kind])
    lines = [name.ljust(margin) + "".join(lane).rstrip() for name, lane in zip(names, lanes)]
    end = f"{timeline.makespan:.4g} {unit}".rstrip()
    return "\n".join(
        [*lines, " " * margin + "0" + end.rjust(width - margin - 1), _bubble(timeline)]
    )


def svg(timeline, title="", unit=""):
    """The timeline as the text of an SVG file, the bubble in its title line.

    Args:
      timeline: a `Timeline`.
      title: what it shows.
      unit: what the times are in, such as "ms".
    """
    span = timeline.makespan or 1.0
    scale = (WIDTH - LEFT - RIGHT) / span
    bottom = TOP + timeline.ranks * (LANE + GAP)
    chunks = 1 + max((e.action.chunk for e in timeline.events), default=0)
    heading = f"{title}: {_bubble(timeline)}" if title else _bubble(timeline).capitalize()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 40}" '
        f'width="{WIDTH}" height="{bottom + 40}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(LEFT, 24, heading, 15, anchor="start", weight="bold"),
        *_legend(timeline, chunks),
    ]
    for rank in range(timeline.ranks):
        y = TOP + rank * (LANE + GAP)
        parts.append(_text(LEFT - 10, y + LANE / 2 + 4, f"rank {rank}", 12, anchor="end"))
        parts.append(_box(LEFT, y, WIDTH - LEFT - RIGHT, PALE))
    for event in timeline.events:
        y = TOP + event.rank * (LANE + GAP)
        parts += _event(event, LEFT + event.start * scale, y, scale, chunks, unit)
    parts += _axis(span, scale, bottom, unit)
    return "\n".join([*parts, "</svg>\n"])


def save(timeline, path, title="", unit=""):
    """Writes the picture of `svg` to a file .svg, or .png where cairosvg is installed.

    Raises:
      ValueError: another suffix.
      ImportError: .png without cairosvg.
    """
    path = pathlib.Path(path)
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"a timeline is written to .svg or .png; received {str(path)!r}")
    picture = svg(timeline, title, unit)
    if path.suffix == ".svg":
        path.write_text(picture, encoding="utf-8")
        return
    try:
        import cairosvg
    except ImportError as error:
        raise ImportError(
            f"{str(path)!r} needs cairosvg: write .svg instead, or pip install cairosvg"
        ) from error
    cairosvg.svg2png(picture.encode(), write_to=str(path), scale=2)


def _bubble(timeline):
    return f"bubble {100 * timeline.bubble:.1f} %"


def _event(event, x, y, scale, chunks, unit):
    kind, m, chunk = event.action
    colour = _tone(COLOURS[kind], chunk, chunks)
    width = (event.end - event.start) * scale
    hint = f"{NAMES[kind]} of micro-batch {m} on stage {event.stage}: "
    hint += f"{event.start:.4g} to {event.end:.4g} {unit}".rstrip()
    yield f"<g><title>{html.escape(hint)}</title>{_box(x, y, width, colour)}"
    if width >= 7 * len(str(m)) + 4:
        yield _text(x + width / 2, y + LANE / 2 + 4, str(m), 12, _ink(colour))
    yield "</g>"


def _legend(timeline, chunks):
    kinds = {event.action.kind for event in timeline.events}
    x = LEFT
    for kind in (kind for kind in NAMES if kind in kinds):
        for chunk in range(chunks):
            yield _box(x + 14 * chunk, 42, 14, _tone(COLOURS[kind], chunk, chunks), 14)
        x += 14 * chunks + 6
        words = NAMES[kind] + (f" (chunks 0 to {chunks - 1})" if chunks > 1 else "")
        yield _text(x, 53, words, 12, anchor="start")
        x += 7 * len(words) + 20
    yield _box(x, 42, 14, PALE, 14) + _text(x + 20, 53, "idle", 12, anchor="start")


def _axis(span, scale, y, unit):
    yield f'<path d="M{LEFT} {y} H{WIDTH - RIGHT}" stroke="{INK}"/>'
    step = _step(span)
    ticks = math.floor(span / step * (1 + 1e-9))
    for tick in range(ticks + 1):
        x = LEFT + tick * step * scale
        label = f"{tick * step:.4g}" + (f" {unit}" if tick == ticks else "").rstrip()
        yield f'<path d="M{x:.2f} {y} v5" stroke="{INK}"/>' + _text(x, y + 19, label, 12)


def _step(span):
    """A step of 1, 2 or 5 times a power of ten that cuts `span` into 4 to 10 parts."""
    power = 10.0 ** math.floor(math.log10(span / 10))
    return next(k * power for k in (1, 2, 5, 10) if span / (k * power) <= 10 * (1 + 1e-9))


def _tone(colour, chunk, chunks):
    """The colour of a chunk: the first as it is, later ones lighter."""
    pale = 0.6 * chunk / max(chunks - 1, 1)
    return "#" + "".join(f"{round(c + (255 - c) * pale):02x}" for c in _rgb(colour))


def _ink(colour):
    """White on dark, ink on light."""
    red, green, blue = _rgb(colour)
    return WHITE if 0.3 * red + 0.59 * green + 0.11 * blue < 130 else INK


def _rgb(colour):
    return [int(colour[k : k + 2], 16) for k in (1, 3, 5)]


def _box(x, y, width, colour, height=LANE):
    line = WHITE if width >= 5 else "none"  # which would hide narrow boxes
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{colour}" '
        f'stroke="{line}"/>'
    )


def _text(x, y, words, size, colour=INK, anchor="middle", weight="normal"):
    return (
        f'<text x="{x:.2f}" y="{y}" font-size="{size}" fill="{colour}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{html.escape(words)}</text>'
    )
