"""Preload ends: what the fork server imports last. From now on it looks for the end of its launcher by itself."""

from gradwire_lab.parent_watch import outlive_parent

outlive_parent()
