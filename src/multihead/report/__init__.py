"""Output beyond a table: the HTML pages, progress bars, and results of pruning as text.

`frame` is what pages share. `page` writes that of a reading from `payload`'s data and the files in
`web/`, and `chosen` picks its attention maps. `checked` writes that of a check from `head_view`.
"""
