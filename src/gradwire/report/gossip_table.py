"""The page of a gossip study: what its file says about it, and a table of the cells that are finished."""

from collections.abc import Mapping, Sequence
from typing import Any

HEADINGS = ("cell", "gamma", "message", "accuracy", "of the workers", "mean model", "distance", "published")


def gossip_page(study: Mapping[str, Any], finished: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> str:
    """Markdown.

    Args:
        study: The study's file, as read.
        finished: Lines of its results.
        sources: Where study and results lie, relative to the page.
    """
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for line in finished:
        by_name.setdefault(line["name"], []).append(line)
    entries: dict[str, Mapping[str, Any]] = {}
    for entry in study["cell"]:
        entries.setdefault(entry["name"], entry)
    groups = study.get("groups") or [""]
    lines = [study.get("about", "").strip(), "", "| " + " | ".join(HEADINGS) + " |", "|---|" + "--:|" * 7]
    missing = []
    for group in groups:
        inside = [entry for entry in entries.values() if entry.get("group", groups[0]) == group]
        if group:
            lines.append(f"| **{group}** |" + " |" * 7)
        for entry in inside:
            told = by_name.get(entry["name"], [])
            lines += [_row(entry, line) for line in told]
            missing += [] if told else [entry["name"]]
    lines += ["", _made(finished), "", "Source: " + ", ".join(f"[{source}]({source})" for source in sources) + "."]
    if missing:
        lines += ["", f"Not trained yet: {', '.join(missing)}. The same command goes on with them."]
    return "\n".join(lines) + "\n"


def _row(entry: Mapping[str, Any], line: Mapping[str, Any]) -> str:
    final, world = line["final"], line["world"]
    gone = "diverged" in final
    workers = final.get("workers") or []
    gamma = "" if line["gossip"]["method"] != "choco" else f"{final['gamma']:.3g}"
    auto = " (auto)" if gamma and "gamma" not in line["gossip"]["options"] else ""
    seed = f", seed {line['seed']}" if line["seed"] else ""
    cells = (
        f"{line['name']}{seed}",
        f"{gamma}{auto}",
        f"{final['payload'] / max(1, final['step']) / 1e3:,.1f}",
        f"diverged at step {_step(final['diverged'])}" if gone else f"{100 * final['value']:.2f}",
        "" if gone or world < 2 else f"{100 * min(workers):.2f} to {100 * max(workers):.2f}",
        "" if gone else f"{100 * final['mean_model']:.2f}",
        "" if gone else f"{final['consensus']:.3g}",
        entry.get("published", ""),
    )
    return "| " + " | ".join(cells) + " |"


def _step(sentence: str) -> str:
    return sentence.partition("step ")[2].partition(";")[0]


def _made(finished: Sequence[Mapping[str, Any]]) -> str:
    """Where it ran, and by which command."""
    if not finished:
        return "Nothing has been trained yet."
    first = finished[0]["environment"]
    command = " ".join(word for word in first["command"])
    where = f"{first['device']}, torch {first['torch']}"
    return f"{len(finished)} cells on {where}, by `{command}`. Gamma of `auto` is that of the last step."
