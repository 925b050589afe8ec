"""Writing K/V rows of committed tokens into pages, in place."""
