"""The shipped model, and a text of the kind that it was trained on."""

from __future__ import annotations

from pathlib import Path

TINY_PYDOC = Path(__file__).resolve().parents[2] / "examples" / "tiny-pydoc"
TEXT = """\
Return the list of all the names that are defined by the module, in the order in which they were added to it.
If the argument is given, it must be a string that holds the path of a directory; every file below it is read,
and those whose name does not end in one of the known suffixes are left out. The function raises an exception
when the file cannot be opened, when its content is not valid, or when the number of bytes that were read is
not what the header says. A class may override this method to return an iterator instead of a list. The
default implementation calls the method of the base class and then removes what the caller has asked to be
ignored. Note that the result is not sorted, and that the same name can occur more than once if several
modules define it. The value of the attribute is a mapping from names to objects; changing it has no effect on
the module itself. Threads that wait for the lock are woken up one after the other, and a timeout given in
seconds limits how long each of them waits. If the timeout is negative, the call does not block at all. On
systems that do not support the operation, an error is raised with a message that says so.
"""
