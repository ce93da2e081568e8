"""What a module is, as a digest: its code, data and settings, and whether they have changed."""
