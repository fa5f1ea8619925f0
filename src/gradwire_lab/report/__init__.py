"""Run folders into pages, pictures and tables. Nothing here needs torch."""
