"""Output beyond a table: the HTML page, progress bars, and results of pruning as text.

`page` writes the page from `payload`'s data and the files in `web/`; `chosen` picks its attention
maps.
"""
