"""The same training step over thin and thick links, by many methods."""
