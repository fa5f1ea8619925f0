"""Preload begins: what the fork server imports first. Until `preload_ends`, it ends at once with its launcher.

The server looks for the end of its launcher only after its imports, which take long where other work holds the cores.
"""

import os

from gradwire_lab.parent_watch import LAUNCHER, end_at_once_with

if (launcher := os.environ.get(LAUNCHER, "")).isdigit():
    end_at_once_with(int(launcher))
