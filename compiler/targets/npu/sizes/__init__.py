"""The sizes of steps that graphs are made for: which, how many a device has room for, and filling steps up."""
