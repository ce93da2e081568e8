"""Tables and HTML files that reports are made of."""
