"""The parts of the HTML report: one file a part, templates beside them."""
