"""Writes what the benchmarks found into docs/performance.md: `python -m benchmarks.table` after
they have run."""

import json
from typing import Any

from benchmarks.harness import RESULTS, ROOT, Spread

BEGIN = "<!-- benchmarks: written by `make bench` from here -->"
END = "<!-- benchmarks: to here -->"


def main() -> None:
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    page = ROOT / "docs" / "performance.md"
    page.write_text(with_results(page.read_text(), results))
    missed = [
        f"{r['benchmark']}: {shown(t)}" for r in results for t in r["targets"] if not t["reached"]
    ]
    num_targets = sum(len(result["targets"]) for result in results)
    print(
        "\n".join(
            [f"{num_targets - len(missed)} of {num_targets} targets reached; missed:", *missed]
        )
    )
    print(f"The table is in {page.relative_to(ROOT)}.")


def with_results(page: str, results: list[dict[str, Any]]) -> str:
    """The page with everything between its two markers written anew.

    Raises:
        ValueError: the page does not have the markers, one after the other.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(
            f"the page needs a line {BEGIN} and after it a line {END}, between which the results go"
        )
    return before + "\n".join([BEGIN, "", *lines(results), END]) + after


def lines(results: list[dict[str, Any]]) -> list[str]:
    """A table of all targets, then each benchmark's measurements."""
    reached = [
        [
            result["benchmark"],
            target["what"],
            f"{target['value']:.3g}",
            wanted(target),
            said(target["reached"]),
        ]
        for result in results
        for target in result["targets"]
    ]
    page = [*table(["benchmark", "what", "measured", "wanted", "reached"], reached), ""]
    for result in results:
        names = list(
            dict.fromkeys(name for row in result["rows"] for name in row.get("ratios", {}))
        )
        rows = [
            [row["what"], row["why"], "", *("" for _ in names)]
            if "why" in row
            else [
                row["what"],
                str(Spread(row["median"], row["least"], row["greatest"])),
                row["unit"],
            ]
            + [f"{row['ratios'][name]:.3g}" if name in row["ratios"] else "" for name in names]
            for row in result["rows"]
        ]
        header = [
            "",
            "median (least to greatest)",
            "unit",
            *(name.replace("_", " ") for name in names),
        ]
        page += [
            f"### {result['benchmark']}",
            "",
            f"{result['title']}. {where_and_when(result)}",
            "",
        ]
        page += [
            *table(header, rows),
            "",
            *(f"- {note}" for note in result["notes"]),
            *([""] if result["notes"] else []),
        ]
    return page


def where_and_when(result: dict[str, Any]) -> str:
    others = result["cores_used_by_others"]
    busy = f" Other processes used {others:g} cores meanwhile." if others >= 0.2 else ""
    commit = (
        f"commit {result['commit']}"
        if "commit" in result
        else "an older commit that was not recorded"
    )
    return f"{result['date']}, {commit}, {result['machine']}.{busy}"


def wanted(target: dict[str, Any]) -> str:
    return f"{target['comparison']} {target['bound']:g}"


def shown(target: dict[str, Any]) -> str:
    return f"{target['what']} is {target['value']:.3g}, wanted {wanted(target)}"


def said(reached: bool) -> str:
    return "yes" if reached else "**no**"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


if __name__ == "__main__":
    main()
