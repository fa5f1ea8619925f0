"""Resume check: whether a run may go on with what is asked for now.

A folder holds one training, which its recipe.toml describes. How long it goes on, on which machine and how often it
logs may change between sessions; any other change would make another training of it.
"""

from pathlib import Path

from gradwire_lab.train import checkpoint, recipe_files
from gradwire_lab.train.recipe import TABLES, Recipe

CHANGEABLE = {
    "data": ("root", "threads"),
    "train": (
        *("workers", "epochs", "iterations", "passes", "graphs", "deterministic"),
        *("eval_batch", "eval_every", "log_every", "save_every"),
    ),
    "sync": ("bucket_mb", "rollback", "timeout"),
    "gossip": ("timeout", "passes"),
    "local": ("passes",),
}


def check_resume(folder: Path, recipe: Recipe) -> None:
    """Refuse to go on from a checkpoint that is damaged, or that another training has left.

    Raises:
        ValueError: The message names the file, or the key of the recipe.
    """
    last = checkpoint.find(folder, "last")
    if last is None:
        return
    checkpoint.inspect(last)
    before = folder / "recipe.toml"
    changed = _changes(recipe_files.load_inert(before), recipe) if before.is_file() else []
    if changed:
        raise ValueError(
            f"{folder} was trained with {' and '.join(old for old, _ in changed)}, but would continue with "
            f"{' and '.join(new for _, new in changed)}; leave that as it was, train apart with --suffix, or start "
            "again with --overwrite"
        )


def _changes(old: Recipe, new: Recipe) -> list[tuple[str, str]]:
    """Keys that differ and may not, before and after."""
    changes = []
    for table in TABLES:
        was, now = getattr(old, table).model_dump(), getattr(new, table).model_dump()
        for key in was:
            if _plain(was[key]) != _plain(now[key]) and key not in CHANGEABLE.get(table, ()):
                changes.append((f"{table}.{key} = {was[key]!r}", f"{now[key]!r}"))
    return changes


def _plain(value: object) -> object:
    """A user's own model, ``path/mine.py:make``, is the same wherever its file lies."""
    return Path(value).name if isinstance(value, str) and ".py:" in value else value
