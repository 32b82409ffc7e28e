"""Markdown tables read back."""


def cells(text: str, key: int = 1, start: str = "") -> dict[str, list[str]]:
    """{the first `key` cells joined by a blank: the cells after them} of the first table after the line `start`."""
    lines = text.splitlines()
    lines = lines[lines.index(start) + 1 :] if start else lines
    first = next(n for n, line in enumerate(lines) if line[:1] == "|")
    body = lines[first + 2 :]
    end = next((n for n, line in enumerate(body) if line[:1] != "|"), len(body))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body[:end]]
    return {" ".join(row[:key]): row[key:] for row in rows}


def middle(cell: str) -> float:
    """The median of "median [lower, upper]"."""
    return float(cell.split(" ")[0].replace(",", ""))
