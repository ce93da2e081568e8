"""Tables and HTML files for reports."""
