"""The page of a gossip study: what its file says about it, and tables of the cells that are finished."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

HEADINGS = ("cell", "gamma", "message", "accuracy", "of the workers", "mean model", "distance", "published")
AGAINST = ("codec", "`auto`", "gammas tried by hand", "the best of them", "its accuracy", "`auto` less that")

Entry = Mapping[str, Any]  # a [[cell]] of the study
Line = Mapping[str, Any]  # of its results


def gossip_page(study: Mapping[str, Any], finished: Sequence[Line], sources: Sequence[str]) -> str:
    """Markdown.

    Args:
        study: The study's file, as read.
        finished: Lines of its results.
        sources: Where study and results lie, relative to the page.
    """
    groups = study.get("groups") or [""]
    entries = _entries(study["cell"])
    inside = {group: [entry for entry in entries if entry.get("group", groups[0]) == group] for group in groups}
    lines = [study.get("about", "").strip(), "", *_head(HEADINGS)]
    for group in groups:
        if group:
            lines.append(f"| **{group}** |" + " |" * 7)
        for entry in inside[group]:
            same = sorted((line for line in finished if line["name"] == entry["name"]), key=itemgetter("seed"))
            lines += [_row(entry.get("published", "") if line is same[0] else "", line) for line in same]
    against = [row for group in groups for row in _against(group, inside[group], finished)]
    if against:
        lines += ["", study.get("compared", "").strip(), "", *_head(AGAINST), *against]
    lines += ["", _made(finished), "", "Source: " + ", ".join(f"[{source}]({source})" for source in sources) + "."]
    missing = list(_missing(study["cell"], finished))
    if missing:
        lines += ["", f"Not trained yet: {', '.join(missing)}. The same command continues with them."]
    return "\n".join(lines) + "\n"


def _head(titles: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(titles) + " |", "|---|" + "--:|" * (len(titles) - 1)]


def _entries(cells: Sequence[Entry]) -> list[Entry]:
    """Each name once, methods in the order of the file, gammas by size."""
    first: dict[str, Entry] = {}
    for cell in cells:
        first.setdefault(cell["name"], cell)
    methods = list(dict.fromkeys(name.split()[0] for name in first))
    return sorted(first.values(), key=lambda cell: (methods.index(cell["name"].split()[0]), _by_hand(cell) or 0.0))


def _by_hand(cell: Entry) -> float | None:
    """The gamma that a cell sets."""
    found = [word.partition("=")[2] for word in cell.get("set", ()) if word.startswith("gossip.options.gamma=")]
    return float(found[-1]) if found else None


def _missing(cells: Sequence[Entry], finished: Sequence[Line]) -> Iterator[str]:
    done = {(line["name"], line["seed"]) for line in finished}
    for cell in cells:
        for seed in cell.get("seeds", [0]):
            if (cell["name"], seed) not in done:
                yield cell["name"] + _seed(seed)


def _seed(seed: int) -> str:
    return f", seed {seed}" if seed else ""


def _row(published: str, line: Line) -> str:
    final, world = line["final"], line["world"]
    gone = "diverged" in final
    workers = final.get("workers") or []
    gamma = "" if line["gossip"]["method"] != "choco" else f"{final['gamma']:.3g}"
    auto = " (auto)" if gamma and "gamma" not in line["gossip"]["options"] else ""
    cells = (
        line["name"] + _seed(line["seed"]),
        f"{gamma}{auto}",
        f"{final['payload'] / max(1, final['step']) / 1e3:,.1f}",
        f"diverged at step {_step(final['diverged'])}" if gone else f"{100 * final['value']:.2f}",
        "" if gone or world < 2 else f"{100 * min(workers):.2f} to {100 * max(workers):.2f}",
        "" if gone else f"{100 * final['mean_model']:.2f}",
        "" if gone else f"{final['consensus']:.3g}",
        published,
    )
    return "| " + " | ".join(cells) + " |"


def _step(sentence: str) -> str:
    return sentence.partition("step ")[2].partition(";")[0]


def _against(group: str, entries: Sequence[Entry], finished: Sequence[Line]) -> Iterator[str]:
    """``gamma=auto`` of a group against the gamma by hand that does best, on the seeds that both have."""
    inside = {entry["name"]: _by_hand(entry) for entry in entries}
    scores: dict[float | None, dict[int, float]] = {}
    for line in finished:
        if line["name"] in inside and line["gossip"]["method"] == "choco":
            scores.setdefault(inside[line["name"]], {})[line["seed"]] = 100 * float(line["final"]["value"])
    auto = scores.pop(None, {})
    pairs = {gamma: [seed for seed in own if seed in auto] for gamma, own in scores.items() if gamma is not None}
    less = {g: sum(auto[s] - scores[g][s] for s in seeds) / len(seeds) for g, seeds in pairs.items() if seeds}
    if less:
        best = min(less, key=lambda gamma: less[gamma])
        means = [sum(own[seed] for seed in pairs[best]) / len(pairs[best]) for own in (auto, scores[best])]
        tried = ", ".join(f"{gamma:g}" for gamma in sorted(less))
        many = f" ({len(pairs[best])} seeds)" if len(pairs[best]) > 1 else ""
        cells = (group, f"{means[0]:.2f}{many}", tried, f"{best:g}", f"{means[1]:.2f}", f"{less[best]:+.2f}")
        yield "| " + " | ".join(cells) + " |"


def _made(finished: Sequence[Line]) -> str:
    """Where it ran, and by which commands."""
    if not finished:
        return "Nothing has been trained yet."
    places = dict.fromkeys(
        f"{line['environment']['device']}, torch {line['environment']['torch']}" for line in finished
    )
    commands = dict.fromkeys(f"`{' '.join(line['environment']['command'])}`" for line in finished)
    where, how = " and ".join(places), " and ".join(commands)
    return f"{len(finished)} cells on {where}, by {how}. Gamma of `auto` is that of the last step."
