"""Autotune: the spec ``auto``, decided while a model trains."""
