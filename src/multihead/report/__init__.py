"""The terminal tables and the HTML page."""
