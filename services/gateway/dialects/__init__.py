"""One module for each form in which clients ask: its bodies, and how its answers are written."""
