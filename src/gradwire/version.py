"""What ranks must have in common to understand one another."""

VERSION = "0.1.0"
WIRE_FORMAT = 2  # raised whenever the bytes of any message change
