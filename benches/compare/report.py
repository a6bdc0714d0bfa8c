"""Results as Markdown and as a plot."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Bar:
    """A bar of the plot: a time or a rate."""

    label: str
    value: float
    text: str
    ours: bool


@dataclass(frozen=True)
class Group:
    """Comparable bars; the longest fills the width."""

    title: str
    bars: list[Bar]


@dataclass(frozen=True)
class Report:
    """One comparison."""

    title: str
    #: Description of the run, for readers of the table alone.
    run: str
    header: list[str]
    rows: list[list[str]]
    groups: list[Group]

    def markdown(self) -> str:
        def line(cells: list[str]) -> str:
            return "| " + " | ".join(cells) + " |"

        return "\n".join([self.run, "", line(self.header), line(["---"] * len(self.header)), *map(line, self.rows)])


def times(ratio: float) -> str:
    """Formats a ratio for people."""
    return f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.1f}×"


def between_markers(text: str, name: str, content: str) -> str:
    """Returns the text with new content between the markers of a name."""
    begin, end = f"<!-- scripts/compare: {name} -->", f"<!-- end of {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the document must have one `{begin}` and one `{end}`")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{content}\n{end}{after}"


WIDTH, LABEL, BAR, LINE, MARGIN = 860, 250, 480, 22, 16


def svg(report: Report) -> str:
    """Horizontal bars in groups. It has its own background, so that it is readable on dark pages
    too."""
    lines = [f'<text x="{MARGIN}" y="{MARGIN + 14}" class="title">{escape(report.title)}</text>']
    y = MARGIN + 30
    for group in report.groups:
        y += 12
        lines.append(f'<text x="{MARGIN}" y="{y + 12}" class="group">{escape(group.title)}</text>')
        y += LINE
        longest = max(bar.value for bar in group.bars)
        for bar in group.bars:
            width = max(1.0, BAR * bar.value / longest)
            lines.append(f'<text x="{MARGIN + 8}" y="{y + 13}">{escape(bar.label)}</text>')
            kind = "ours" if bar.ours else "theirs"
            lines.append(f'<rect x="{LABEL}" y="{y + 2}" width="{width:.1f}" height="{LINE - 7}" class="{kind}"/>')
            lines.append(f'<text x="{LABEL + width + 6:.1f}" y="{y + 13}">{escape(bar.text)}</text>')
            y += LINE
    height = y + MARGIN
    style = (
        "text{font:12px system-ui,sans-serif;fill:#222}.title{font-size:15px;font-weight:600}.group{font-weight:600}"
        ".ours{fill:#1f7a5c}.theirs{fill:#9aa5b1}"
    )
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">',
        f"<style>{style}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    return "\n".join([*head, *lines, "</svg>", ""])
