"""report.html: a run as one page, made of the files in its folder alone."""
