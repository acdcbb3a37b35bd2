"""Private names of other libraries that this package uses: one file for each library, with the reasons.

Private names are imported here and nowhere else. ``ATTRIBUTES`` lists the private attributes that are used of objects:
name to (who has it, why it is used). ``tests/test_upstream.py`` looks for each in the installed versions.
"""
