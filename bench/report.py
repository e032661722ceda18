"""The figures of a run as a table on a terminal, as Markdown, and as JSON."""

import statistics

COLUMNS = ("peer", "step", "ratio", "first step", "ratio", "peak memory", "variables a device")

NOTE = (
    "Ratios are to plain Keras on one device. All devices are virtual and share the cores of one "
    "machine: ratios show the overhead of distribution, not its scaling."
)


def summary(workload, peer, raw, plain):
    """One row of results from a peer's raw figures and those of plain Keras (or None).

    The step ratio is the median over rounds of the ratio within the round, so that what slows the
    machine down for a while slows both sides of it.
    """
    row = {
        "workload": workload,
        "peer": peer,
        "step_seconds": statistics.median(raw["blocks"]),
        "step_ratio": None,
        "first_step_seconds": raw["first_step"],
        "first_step_ratio": None,
        "peak_bytes": raw["peak_bytes"],
        "variable_bytes_per_device": raw["variable_bytes"],
        "blocks": raw["blocks"],
    }
    if plain is not None:
        rounds = zip(raw["blocks"], plain["blocks"], strict=True)
        row["step_ratio"] = statistics.median(mine / theirs for mine, theirs in rounds)
        row["first_step_ratio"] = raw["first_step"] / plain["first_step"]
    return row


def cells(row):
    def ratio(value):
        return "-" if value is None else f"{value:.2f}"

    return (
        row["peer"],
        f"{row['step_seconds'] * 1e3:.2f} ms",
        ratio(row["step_ratio"]),
        f"{row['first_step_seconds']:.2f} s",
        ratio(row["first_step_ratio"]),
        f"{row['peak_bytes'] / 2**20:.0f} MiB",
        f"{row['variable_bytes_per_device']:,} B",
    )


def table(title, rows, markdown=False):
    """The rows of one workload as aligned text or as a Markdown table."""
    lines = [COLUMNS, *map(cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]

    def aligned(line):
        first, *rest = line
        numbers = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        return [first.ljust(widths[0]), *numbers]

    if markdown:
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        body = [aligned(COLUMNS), rule, *map(aligned, lines[1:])]
        text = "\n".join("| " + " | ".join(line) + " |" for line in body)
        return f"**{title}**\n\n{text}\n"
    body = [aligned(COLUMNS), ["-" * width for width in widths], *map(aligned, lines[1:])]
    return f"{title}\n" + "\n".join("  ".join(line) for line in body) + "\n"
