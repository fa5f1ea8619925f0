"""What a step will cost, before it is taken."""
