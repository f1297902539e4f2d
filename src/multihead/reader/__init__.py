"""Reading: what is measured of a head, as a model runs."""
