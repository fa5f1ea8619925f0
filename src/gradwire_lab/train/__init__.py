"""Small real trainings, and the processes that they run in."""
