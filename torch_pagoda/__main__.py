"""``python -m torch_pagoda``: the command ``pagoda``, for launchers that start modules."""

from .cli import main

if __name__ == "__main__":
    main()
