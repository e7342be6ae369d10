"""Reports: results turned into tables, plots and markdown."""
